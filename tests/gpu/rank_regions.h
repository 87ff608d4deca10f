// The device memory of a rank of a group, as an arena would have it, and an operation's view of it; for tests
// without a daemon, by whichever driver.
#pragma once

#include "kernels/cuda.h"
#include "proto/exchange.h"

#include <cstddef>
#include <cstdint>

namespace epd::gpu_test {

inline std::size_t num_choices(const kernels::Shape& s) {
  return s.per_expert ? 1 : s.topk;
}
inline std::size_t num_placement_words(const kernels::Shape& s) {
  return abi::placement_words(s.num_ranks, s.num_experts, s.per_expert);
}
// As far as it says how long rows are, and where things lie in exchange arenas.
inline abi::GroupShape group_shape(const kernels::Shape& s, std::uint32_t max_tokens, std::uint32_t depth) {
  abi::GroupShape shape{};
  shape.num_ranks = s.num_ranks;
  shape.num_experts = s.num_experts;
  shape.max_tokens = max_tokens;
  shape.hidden = s.hidden;
  shape.topk = s.topk;
  shape.depth = depth;
  shape.payload = s.format.cast               ? abi::Payload::kFp8Cast
                  : s.format.scale_bytes != 0 ? abi::Payload::kFp8
                                              : abi::Payload::kOpaque;
  shape.layout = s.per_expert ? abi::Layout::kExpert : abi::Layout::kCompact;
  shape.scale_format = s.format.scales;
  shape.opaque_bytes = s.format.row_bytes;
  return shape;
}

struct RegionSizes {
  kernels::Shape shape;
  std::size_t max_tokens = 0;
  std::size_t workspace_bytes = 0;
  std::size_t inbox_bytes = 0;

  // The bytes of all regions, with up to 4 KiB of padding for each piece.
  std::size_t total() const {
    const kernels::RowFormat& f = shape.format;
    const std::size_t index_bytes = shape.index64 ? 8 : 4;
    const std::size_t row =
        f.row_bytes + num_choices(shape) * (index_bytes + 8) + 8 + std::size_t{shape.hidden} * 2;
    const std::size_t token =
        f.x_bytes + f.scale_bytes + shape.topk * (index_bytes + 16) + std::size_t{shape.hidden} * 6;
    return shape.recv_rows * row + f.scales_bytes(shape.recv_rows) + max_tokens * token +
           num_placement_words(shape) * 16 + workspace_bytes + inbox_bytes +
           std::size_t{shape.num_ranks} * (shape.num_ranks + shape.num_experts + 64) * 4 + (256 << 10);
  }
};

struct RankRegions {
  kernels::Peer peer;
  std::uint8_t* x = nullptr;
  std::uint8_t* x_scales = nullptr;
  void* topk_idx = nullptr;
  float* topk_weights = nullptr;
  std::uint16_t* y = nullptr;
  float* y_weights = nullptr;
  std::uint16_t* bias[2] = {};
  std::uint16_t* out = nullptr;
  float* out_weights = nullptr;
  kernels::Routing routing;  // without a head: an operation asks for it itself
  abi::RoutingRecord* head = nullptr;
  kernels::CountOutputs counts;  // those of the host are the caller's to add
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  kernels::OpResult* result = nullptr;
  std::uint32_t* abort = nullptr;  // of the host; the caller's to add
  std::uint32_t num_tokens = 0;

  // Memory::take<T>(count) hands out pieces.
  template <typename Memory>
  void take_from(Memory& m, const RegionSizes& sizes) {
    take_peer(m, sizes);
    const kernels::Shape& s = sizes.shape;
    const std::size_t tokens = sizes.max_tokens;
    const std::size_t experts = s.num_experts / s.num_ranks;
    x = m.template take<std::uint8_t>(tokens * s.format.x_bytes);
    x_scales = m.template take<std::uint8_t>(tokens * s.format.scale_bytes);
    topk_idx = m.template take<std::uint8_t>(tokens * s.topk * (s.index64 ? 8 : 4));
    topk_weights = m.template take<float>(tokens * s.topk);
    for (auto& each : bias) each = m.template take<std::uint16_t>(tokens * s.hidden);
    out = m.template take<std::uint16_t>(tokens * s.hidden);
    out_weights = m.template take<float>(tokens * s.topk);
    routing.topk = m.template take<std::int32_t>(tokens * s.topk);
    routing.rows = m.template take<std::int32_t>(tokens * s.topk);
    routing.placement = m.template take<std::int32_t>(num_placement_words(s));
    head = m.template take<abi::RoutingRecord>(1);
    counts.rank_offsets = m.template take<std::int32_t>(s.num_ranks + 1);
    counts.expert_counts = m.template take<std::int32_t>(experts);
    counts.expert_offsets = m.template take<std::int32_t>(experts + 1);
    counts.source_ranges = m.template take<std::int32_t>(experts * s.num_ranks * 2);
    workspace = m.template take<std::uint8_t>(sizes.workspace_bytes);
    workspace_bytes = sizes.workspace_bytes;
    result = m.template take<kernels::OpResult>(1);
  }

  // Describes an operation of this rank. The caller adds its peers and the rest.
  void describe(kernels::cuda::Operation& op) const {
    op.num_tokens = num_tokens;
    op.routing = routing;
    op.counts = counts;
    op.topk_idx = topk_idx;
    op.x = x;
    op.out = out;
    op.workspace = workspace;
    op.workspace_bytes = workspace_bytes;
    op.abort = abort;
    op.result = result;
  }

 private:
  template <typename Memory>
  void take_peer(Memory& m, const RegionSizes& sizes) {
    const kernels::Shape& s = sizes.shape;
    const std::size_t rows = s.recv_rows;
    const std::size_t choices = rows * num_choices(s);
    peer.ready = m.template take<abi::SignalLine>(s.num_ranks);
    peer.arrived = m.template take<abi::SignalLine>(s.num_ranks);
    peer.announcement = m.template take<abi::OpAnnouncement>(s.num_ranks);
    peer.rank_counts = m.template take<std::uint32_t>(s.num_ranks * s.num_ranks);
    peer.expert_counts = m.template take<std::uint32_t>(s.num_ranks * s.num_experts);
    if (sizes.inbox_bytes != 0) peer.inbox = m.template take<std::uint8_t>(sizes.inbox_bytes);
    peer.target = {m.template take<std::uint8_t>(rows * s.format.row_bytes),
                   m.template take<std::uint8_t>(s.format.scales_bytes(rows)),
                   m.template take<std::uint8_t>(choices * (s.index64 ? 8 : 4)),
                   m.template take<float>(choices), m.template take<std::int32_t>(rows * 2)};
    y = m.template take<std::uint16_t>(rows * s.hidden);
    y_weights = m.template take<float>(choices);
    peer.source = {y, y_weights};
  }
};

}  // namespace epd::gpu_test
