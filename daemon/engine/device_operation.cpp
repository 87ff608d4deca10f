#include "device_operation.h"

#include "proto/route_memory.h"

#include <algorithm>

namespace epd::engine {

namespace {

kernels::RowFormat row_format(const abi::GroupShape& s) {
  kernels::RowFormat format;
  format.cast = s.payload == abi::Payload::kFp8Cast;
  format.scales = s.scale_format;
  format.hidden = s.hidden;
  format.x_bytes = s.x_bytes();
  format.row_bytes = s.row_bytes();
  format.scale_bytes = s.scale_bytes();
  kernels::set_scale_layout(format, s);
  return format;
}

kernels::Shape device_shape(const abi::GroupShape& s) {
  kernels::Shape shape;
  shape.num_ranks = s.num_ranks;
  shape.num_experts = s.num_experts;
  shape.topk = s.topk;
  shape.hidden = s.hidden;
  shape.per_expert = s.per_expert();
  shape.expert_blocks = s.layout == abi::Layout::kExpert;
  shape.index64 = s.index_type == abi::IndexType::kInt64;
  shape.packed_ranges = s.range_format == abi::RangeFormat::kPacked64;
  shape.alignment = s.expert_alignment;
  shape.expert_capacity = s.expert_capacity();
  shape.recv_rows = s.recv_rows();
  shape.format = row_format(s);
  return shape;
}

// Sets all formats beyond the first.
void set_more_formats(const abi::GroupShape& s, kernels::RowFormat (&more)[abi::kMaxMoreFormats]) {
  for (std::uint32_t i = 1; i < s.num_formats(); ++i) more[i - 1] = row_format(s.with_format(i));
}

}  // namespace

device::LaneShape lane_shape(const abi::GroupShape& shape, std::int32_t priority) {
  device::LaneShape lane;
  lane.shape = device_shape(shape);
  set_more_formats(shape, lane.more_formats);
  lane.limits = abi::op_limits(shape);
  lane.placement_words = static_cast<std::uint32_t>(abi::placement_words(shape));
  lane.priority = priority;
  lane.inbox = kernels::inbox_of(shape);
  lane.block_bytes = abi::ExchangeArenaLayout(shape).block_bytes;
  lane.kept_plans = abi::kept_routes(shape);
  lane.sum_ranks = shape.sum_ranks;
  return lane;
}

kernels::GroupView group_view(const Group& group, std::uint32_t rank) {
  const GroupRankMemory& memory = group.ranks[rank];
  kernels::GroupView view;
  view.shape = device_shape(group.shape);
  set_more_formats(group.shape, view.more_formats);
  view.inbox = kernels::inbox_of(group.shape);
  view.rank = rank;
  view.exchange_arena = reinterpret_cast<std::uint8_t*>(memory.exchange->bytes());
  view.exchange = group.exchange_layout;
  for (std::uint32_t region = 0; region < abi::kNumRegions; ++region)
    view.regions[region] = memory.region(static_cast<abi::Region>(region));
  return view;
}

namespace {

std::uint32_t other_ranks(const Member& member, bool of_device) {
  if (!member.lane->by_kernels()) return 0;
  const Group& group = member.group;
  const std::uint32_t device = group.ranks[member.rank].device_index;
  std::uint32_t ranks = 0;
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    if (rank != member.rank && group.active(rank) && (!of_device || group.ranks[rank].device_index == device))
      ranks |= 1u << rank;
  }
  return ranks;
}

}  // namespace

std::uint32_t ranks_together(const Member& member) {
  return other_ranks(member, true);
}

kernels::GroupView epoch_view(const Member& member) {
  kernels::GroupView view = member.view;
  view.together = ranks_together(member);
  view.others = other_ranks(member, false);
  return view;
}

std::vector<kernels::PeerView> peer_views(const Group& group) {
  std::vector<kernels::PeerView> views;
  for (const GroupRankMemory& rank : group.ranks) views.push_back(rank.view);
  return views;
}

kernels::MemoryTable memory_table(const Group& group) {
  kernels::MemoryTable table;
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    const auto& mapped = group.ranks[rank].mapped;
    std::transform(mapped.begin(), mapped.end(), table.of[rank], [](const auto& its) { return its.memory; });
  }
  return table;
}

}  // namespace epd::engine
