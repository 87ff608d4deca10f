// A slot's regions as a client sees them.
#pragma once

#include "epd/epd.h"
#include "proto/arena.h"

namespace epd::test {

// `at(region)` is where the region begins, or null.
template <typename At>
epd_buffers_t region_buffers(const At& at) {
  using abi::Region;
  const auto as = [&]<typename T>(T*, Region region) { return reinterpret_cast<T*>(at(region)); };
  epd_buffers_t b;
  epd_buffers_init(&b);
  b.x = at(Region::kX);
  b.topk_idx = at(Region::kTopkIdx);
  b.topk_weights = as(b.topk_weights, Region::kTopkWeights);
  b.recv_x = at(Region::kRecvX);
  b.recv_scales = at(Region::kRecvScales);
  b.recv_topk_idx = at(Region::kRecvTopkIdx);
  b.recv_topk_weights = as(b.recv_topk_weights, Region::kRecvTopkWeights);
  b.recv_src = as(b.recv_src, Region::kRecvSrc);
  b.rank_offsets = as(b.rank_offsets, Region::kRankOffsets);
  b.expert_counts = as(b.expert_counts, Region::kExpertCounts);
  b.y = at(Region::kY);
  b.out = at(Region::kOut);
  b.x_scales = at(Region::kXScales);
  b.expert_offsets = as(b.expert_offsets, Region::kExpertOffsets);
  b.source_ranges = as(b.source_ranges, Region::kSourceRanges);
  b.y_weights = as(b.y_weights, Region::kYWeights);
  b.bias[0] = at(Region::kBias0);
  b.bias[1] = at(Region::kBias1);
  b.out_weights = as(b.out_weights, Region::kOutWeights);
  return b;
}

}  // namespace epd::test
