// The group view: what is constant for a rank in an epoch. Also how a call becomes an operation by the view.
// These functions are the same for kernels and hosts.
#pragma once

#include "kernels/host_device.h"
#include "kernels/resident.h"
#include "kernels/row_places.h"
#include "proto/arena.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels::cuda {

// Where a region lies. `base` is null if the group does not have the region.
struct RegionPlace {
  std::uint8_t* base = nullptr;  // of slot 0
  std::uint64_t stride = 0;      // bytes from slot to slot

  template <typename T>
  EPD_HOST_DEVICE T* at(std::uint32_t slot) const {
    return base == nullptr ? nullptr : reinterpret_cast<T*>(base + stride * slot);  // NOLINT
  }
};

// A rank as this device reaches it.
struct alignas(16) PeerView {
  std::uint8_t* exchange = nullptr;  // exchange arena of the rank; null: the rank is inactive
  std::uint64_t since = 0;           // the epoch in which the rank joined: it has no rows of older routings
  RegionPlace recv_x;
  RegionPlace recv_scales;
  RegionPlace recv_topk_idx;
  RegionPlace recv_topk_weights;
  RegionPlace recv_src;
  RegionPlace y;
  RegionPlace y_weights;
};
static_assert(sizeof(PeerView) == 128);

// The rank itself, and its group.
struct alignas(16) GroupView {
  Shape shape;                                   // with divisors; has row format 0
  RowFormat more_formats[abi::kMaxMoreFormats];  // formats 1..
  Inbox inbox;
  std::uint32_t rank = 0;
  std::uint8_t* exchange_arena = nullptr;  // of the rank itself
  void* workspace = nullptr;
  std::uint64_t workspace_bytes = 0;
  abi::ExchangeArenaLayout exchange{abi::GroupShape{1, 1, 1, 128, 1, 1, {}, {}, {}}};
  RegionPlace regions[abi::kNumRegions];
  const abi::RegisteredMemory* memories = nullptr;  // see Operation::memories

  EPD_HOST_DEVICE const RegionPlace& region(abi::Region r) const {
    return regions[static_cast<std::uint32_t>(r)];
  }
};
// The group view as the resident kernel gets it.
struct DeviceView {
  GroupView group;
  PeerView peers[kMaxRanks];
};
static_assert(sizeof(DeviceView) % 16 == 0 && sizeof(GroupView) % 16 == 0);

// The kinds of work division. For each kind there is a WorkDivision for each number of CTAs.
// Dispatches of row format 0, 1, ...; combines with 0, 1, ... biases.
inline constexpr std::uint32_t kDivisionKinds = abi::kMaxFormats + 1 + abi::kMaxBiases;
EPD_HOST_DEVICE constexpr std::uint32_t division_kind(abi::Op op, std::uint32_t flags) {
  return op == abi::Op::kDispatch ? abi::format_of(flags) : abi::kMaxFormats + abi::num_biases(flags);
}

// ---- composing a call's operation, part by part

EPD_HOST_DEVICE inline bool has_flag(const TakenCall& call, abi::OpFlags flag) {
  return (call.flags & flag) != 0;
}
EPD_HOST_DEVICE inline bool is_dispatch(const TakenCall& call) {
  return call.op() == abi::Op::kDispatch;
}
EPD_HOST_DEVICE inline bool makes_routing(const TakenCall& call) {
  return abi::makes_routing(call.op(), call.flags);
}

// Composes a rank as the operation reaches it.
EPD_HOST_DEVICE inline void compose_peer(Peer& peer, const abi::ExchangeArenaLayout& layout,
                                         const PeerView& rank, const TakenCall& call) {
  const bool dispatch = is_dispatch(call);
  peer = {};
  if (rank.exchange == nullptr) return;
  std::uint8_t* const block = rank.exchange + layout.block_bytes * call.block;
  peer.ready = reinterpret_cast<abi::SignalLine*>(block + layout.ready);
  peer.arrived = reinterpret_cast<abi::SignalLine*>(block + layout.arrived);
  peer.announcement = reinterpret_cast<abi::OpAnnouncement*>(block + layout.announcement);
  peer.rank_counts = reinterpret_cast<std::uint32_t*>(block + layout.rank_counts);
  peer.expert_counts = reinterpret_cast<std::uint32_t*>(block + layout.expert_counts);
  if (layout.inbox_bytes != 0) peer.inbox = rank.exchange + layout.inboxes + layout.inbox_bytes * call.block;
  if (dispatch) {
    peer.target.recv_x = rank.recv_x.at<void>(call.slot);
    peer.target.recv_scales = rank.recv_scales.at<void>(call.slot);
    peer.target.recv_topk_idx = rank.recv_topk_idx.at<void>(call.slot);
    peer.target.recv_topk_weights = rank.recv_topk_weights.at<float>(call.slot);
    peer.target.recv_src = rank.recv_src.at<std::int32_t>(call.slot);
  } else if (rank.since <= abi::epoch_of_tag(call.routing_tag)) {  // else it has no rows of the routing
    peer.source.y = rank.y.at<const std::uint16_t>(call.slot);
    if (has_flag(call, abi::kFlagReturnWeights))
      peer.source.y_weights = rank.y_weights.at<const float>(call.slot);
  }
}

// The row format of a dispatch.
EPD_HOST_DEVICE inline const RowFormat& row_format(const GroupView& view, const TakenCall& call) {
  const std::uint32_t format = abi::format_of(call.flags);
  return format == 0 ? view.shape.format : view.more_formats[format - 1];
}

// Composes one of the rank's own regions.
EPD_HOST_DEVICE inline void compose_region(Operation& op, const GroupView& view, abi::Region region,
                                           const TakenCall& call) {
  using abi::Region;
  const bool dispatch = is_dispatch(call);
  const std::uint32_t biases = abi::num_biases(call.flags);
  std::uint8_t* const own = view.region(region).at<std::uint8_t>(call.slot);
  std::uint8_t* const of_dispatch = dispatch ? own : nullptr;
  std::uint8_t* const of_combine = dispatch ? nullptr : own;
  const auto counts = reinterpret_cast<std::int32_t*>(of_dispatch);
  switch (region) {
    case Region::kX: op.x = of_dispatch; break;
    case Region::kXScales: op.x_scales = row_format(view, call).takes_scales() ? of_dispatch : nullptr; break;
    case Region::kTopkIdx: op.topk_idx = of_dispatch; break;
    case Region::kTopkWeights:
      op.topk_weights = has_flag(call, abi::kFlagWeights) ? reinterpret_cast<const float*>(own) : nullptr;
      break;
    case Region::kRankOffsets: op.counts.rank_offsets = counts; break;
    case Region::kExpertCounts: op.counts.expert_counts = counts; break;
    case Region::kExpertOffsets: op.counts.expert_offsets = counts; break;
    case Region::kSourceRanges: op.counts.source_ranges = counts; break;
    case Region::kBias0:
      op.bias[0] = biases > 0 ? reinterpret_cast<const std::uint16_t*>(of_combine) : nullptr;
      break;
    case Region::kBias1:
      op.bias[1] = biases > 1 ? reinterpret_cast<const std::uint16_t*>(of_combine) : nullptr;
      break;
    case Region::kOut: op.out = reinterpret_cast<std::uint16_t*>(of_combine); break;
    case Region::kOutWeights:
      op.out_weights =
          has_flag(call, abi::kFlagReturnWeights) ? reinterpret_cast<float*>(of_combine) : nullptr;
      break;
    default: break;  // regions that other ranks use
  }
}

// Composes what the rank announces, and the flags of the call.
EPD_HOST_DEVICE inline void compose_announcement(Operation& op, const TakenCall& call) {
  op.tag = call.tag;
  op.num_tokens = call.num_tokens;
  op.announcement.tag = call.tag;
  op.announcement.op = static_cast<std::uint32_t>(call.op());
  op.announcement.slot = call.slot;
  op.announcement.format = static_cast<std::uint16_t>(abi::format_of(call.flags));
  op.announcement.routing = call.routing_tag;
  op.announcement.num_tokens = call.num_tokens;
  op.announcement.flags = static_cast<std::uint16_t>(call.flags);
  op.announcement.route = static_cast<std::uint16_t>(call.route);
  op.announcement.place = 0;
  const bool dispatch = is_dispatch(call);
  op.cached = dispatch && !makes_routing(call);
  op.mark_unused = dispatch && has_flag(call, abi::kFlagMarkUnused);
  op.zero_padding = dispatch && has_flag(call, abi::kFlagZeroPadding);
  op.sum_weights = !dispatch && has_flag(call, abi::kFlagSumWeights);
}

// Composes the pointers to the routing record.
EPD_HOST_DEVICE inline void compose_routing(Operation& op, const GroupView& view, const TakenCall& call) {
  const abi::ExchangeArenaLayout& layout = view.exchange;
  std::uint8_t* const half = view.exchange_arena + layout.routing + layout.routing_bytes * call.route +
                             layout.half_bytes * call.half;
  op.routing.topk = reinterpret_cast<std::int32_t*>(half + layout.topk);
  op.routing.rows = reinterpret_cast<std::int32_t*>(half + layout.rows);
  op.routing.placement = reinterpret_cast<std::int32_t*>(half + layout.placement);
  auto* const record = reinterpret_cast<abi::RoutingRecord*>(half);
  op.routing.head = makes_routing(call) ? record : nullptr;
  op.routing.record = makes_routing(call) ? nullptr : record;
  op.routing.handle = abi::index_of_tag(call.tag) + 1;
  op.routing.epoch = abi::epoch_of_tag(call.tag);
}

// Composes what is the same for all calls. The row format is that of format 0.
EPD_HOST_DEVICE inline void compose_constants(Operation& op, const GroupView& view) {
  op.shape = view.shape;
  op.inbox = view.inbox;
  op.rank = view.rank;
  op.workspace = view.workspace;
  op.workspace_bytes = view.workspace_bytes;
  op.memories = view.memories;
}

// Composes an operation without peers, work division, signal, abort and timeout, and without the places of
// its results.
inline Operation compose(const GroupView& view, const TakenCall& call) {
  Operation op;
  compose_constants(op, view);
  for (std::uint32_t region = 0; region < abi::kNumRegions; ++region)
    compose_region(op, view, static_cast<abi::Region>(region), call);
  compose_announcement(op, call);
  compose_routing(op, view, call);
  op.shape.format = row_format(view, call);
  return op;
}

}  // namespace epd::kernels::cuda
