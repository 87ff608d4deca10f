// These functions turn a group's configuration into the structs of layouts and of the reference.
#pragma once

#include "epd/epd.h"
#include "kernels/reference.h"
#include "proto/shape.h"

#include <cstdint>

namespace epd::test {

inline abi::GroupShape shape_of(const epd_group_config_t& c) {
  abi::GroupShape s{};
  // [fields.py: shape_of]
  s.num_ranks = c.num_ranks;
  s.num_experts = c.num_experts;
  s.max_tokens = c.max_tokens;
  s.hidden = c.hidden;
  s.topk = c.topk;
  s.depth = c.depth != 0 ? c.depth : abi::kDefaultDepth;
  s.payload = static_cast<abi::Payload>(c.payload);
  s.index_type = static_cast<abi::IndexType>(c.index_type);
  s.policy = static_cast<abi::LossPolicy>(c.policy);
  s.layout = static_cast<abi::Layout>(c.layout);
  s.scale_format = static_cast<abi::ScaleFormat>(c.scale_format);
  s.expert_alignment = c.expert_alignment != 0 ? c.expert_alignment : 1;
  s.opaque_bytes = c.opaque_bytes;
  s.num_biases = c.num_biases;
  s.num_handles = c.num_handles;
  s.max_recv_rows = c.max_recv_rows;
  s.sum_ranks = c.sum_ranks;
  s.span = static_cast<abi::Span>(c.span);
  s.scale_layout = static_cast<abi::ScaleLayout>(c.scale_layout);
  s.range_format = static_cast<abi::RangeFormat>(c.range_format);
  s.shared_regions = c.shared_regions;
  // [end]
  s.num_more_formats = c.num_more_formats;
  for (std::uint32_t i = 0; i < c.num_more_formats && i < abi::kMaxMoreFormats;
       ++i)  // more: check_shape says so
    s.more_formats[i] = {static_cast<abi::Payload>(c.more_formats[i].payload),
                         static_cast<abi::ScaleFormat>(c.more_formats[i].scale_format)};
  return s;
}

// But for masks.
inline kernels::reference::GroupParams params_of(const epd_group_config_t& c) {
  kernels::reference::GroupParams p;
  p.num_ranks = c.num_ranks;
  p.num_experts = c.num_experts;
  p.hidden = c.hidden;
  p.topk = c.topk;
  p.payload = static_cast<kernels::reference::Payload>(c.payload);
  p.scale_format = static_cast<kernels::ScaleFormat>(c.scale_format);
  p.layout = static_cast<kernels::reference::Layout>(c.layout);
  p.alignment = c.expert_alignment;
  p.expert_capacity = static_cast<std::uint32_t>(shape_of(c).expert_capacity());
  p.opaque_bytes = c.opaque_bytes;
  p.sum_ranks = c.sum_ranks;
  p.scale_layout = static_cast<abi::ScaleLayout>(c.scale_layout);
  p.range_format = static_cast<abi::RangeFormat>(c.range_format);
  return p;
}

}  // namespace epd::test
