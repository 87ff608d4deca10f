// The group view: what is constant for a rank in an epoch. Also how a call becomes an operation by the view.
// These functions are the same for kernels and hosts.
#pragma once

#include "kernels/host_device.h"
#include "kernels/row_places.h"
#include "kernels/workers.h"
#include "proto/arena.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace epd::kernels {

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
  // The set of the other active ranks on the same device. A gate lets an operation begin when all of them
  // have called it. So no main kernel waits inside an operation for a client that needs a kernel of this
  // device.
  std::uint32_t together = 0;
  std::uint32_t others =
      0;  // the set of all other active ranks: a deferred operation begins when they have called it
  std::uint8_t* exchange_arena = nullptr;  // of the rank itself
  void* workspace = nullptr;
  std::uint64_t workspace_bytes = 0;
  abi::ExchangeArenaLayout exchange{abi::GroupShape{1, 1, 1, 128, 1, 1, {}, {}, {}}};
  RegionPlace regions[abi::kNumRegions];
  const abi::MappedMemory* memories = nullptr;  // see Operation::memories

  EPD_HOST_DEVICE const RegionPlace& region(abi::Region r) const {
    return regions[static_cast<std::uint32_t>(r)];
  }
};
// The group view as gates and main kernels get it.
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

// Composes a rank as the operation reaches it, in two parts: what lies in its exchange arena, and its rows.
EPD_HOST_DEVICE inline void compose_peer_exchange(Peer& peer, const abi::ExchangeArenaLayout& layout,
                                                  const PeerView& rank, const TakenCall& call) {
  const bool active = rank.exchange != nullptr;
  std::uint8_t* const block = rank.exchange + layout.block_bytes * call.block;
  const auto at = [=](std::uint64_t offset) { return active ? block + offset : nullptr; };
  peer.ready = reinterpret_cast<abi::SignalLine*>(at(layout.ready));
  peer.arrived = reinterpret_cast<abi::SignalLine*>(at(layout.arrived));
  peer.announcement = reinterpret_cast<abi::OpAnnouncement*>(at(layout.announcement));
  peer.rank_counts = reinterpret_cast<std::uint32_t*>(at(layout.rank_counts));
  peer.expert_counts = reinterpret_cast<std::uint32_t*>(at(layout.expert_counts));
  peer.inbox = active && layout.inbox_bytes != 0
                   ? rank.exchange + layout.inboxes + layout.inbox_bytes * call.block
                   : nullptr;
}
EPD_HOST_DEVICE inline void compose_peer_rows(Peer& peer, const PeerView& rank, const TakenCall& call) {
  peer.target = {};
  peer.source = {};
  if (rank.exchange == nullptr) return;
  if (is_dispatch(call)) {
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
EPD_HOST_DEVICE inline void compose_peer(Peer& peer, const abi::ExchangeArenaLayout& layout,
                                         const PeerView& rank, const TakenCall& call) {
  compose_peer_exchange(peer, layout, rank, call);
  compose_peer_rows(peer, rank, call);
}

// The row format of a dispatch.
EPD_HOST_DEVICE inline const RowFormat& row_format(const GroupView& view, const TakenCall& call) {
  const std::uint32_t format = abi::format_of(call.flags);
  return format == 0 ? view.shape.format : view.more_formats[format - 1];
}

// Where an operation has the pointers to the rank's own regions: a byte for each region, in units of 8 bytes.
// 0: other ranks use the region.
class OwnPointers {
 public:
  constexpr OwnPointers() {
    using abi::Region;
    constexpr std::size_t kCounts = offsetof(Operation, counts);
    set(Region::kX, offsetof(Operation, x));
    set(Region::kXScales, offsetof(Operation, x_scales));
    set(Region::kTopkIdx, offsetof(Operation, topk_idx));
    set(Region::kTopkWeights, offsetof(Operation, topk_weights));
    set(Region::kRankOffsets, kCounts + offsetof(CountOutputs, rank_offsets));
    set(Region::kExpertCounts, kCounts + offsetof(CountOutputs, expert_counts));
    set(Region::kExpertOffsets, kCounts + offsetof(CountOutputs, expert_offsets));
    set(Region::kSourceRanges, kCounts + offsetof(CountOutputs, source_ranges));
    set(Region::kBias0, offsetof(Operation, bias));
    set(Region::kBias1, offsetof(Operation, bias) + sizeof(void*));
    set(Region::kOut, offsetof(Operation, out));
    set(Region::kOutWeights, offsetof(Operation, out_weights));
  }
  // Returns the place of the region's pointer, counted in pointers; 0: none.
  EPD_HOST_DEVICE constexpr std::uint32_t place(std::uint32_t region) const {
    const std::uint64_t word = region < 8 ? words_[0] : region < 16 ? words_[1] : words_[2];
    return static_cast<std::uint32_t>(word >> region % 8 * 8) & 0xff;
  }

 private:
  constexpr void set(abi::Region region, std::size_t offset) {
    const auto i = static_cast<std::uint32_t>(region);
    words_[i / 8] |= std::uint64_t{offset / 8} << i % 8 * 8;
  }
  std::uint64_t words_[3] = {};
  static_assert(abi::kNumRegions <= 24);
  static_assert(sizeof(Operation) / 8 <= 0xff);
};

// The set of own regions that the call uses.
EPD_HOST_DEVICE inline std::uint32_t own_regions(const GroupView& view, const TakenCall& call) {
  using abi::Region;
  const auto bit = [](Region region, bool used) {
    return used ? 1u << static_cast<std::uint32_t>(region) : 0u;
  };
  const bool dispatch = is_dispatch(call);
  const std::uint32_t biases = dispatch ? 0 : abi::num_biases(call.flags);
  return bit(Region::kX, dispatch) |
         bit(Region::kXScales, dispatch && row_format(view, call).takes_scales()) |
         bit(Region::kTopkIdx, dispatch) | bit(Region::kTopkWeights, has_flag(call, abi::kFlagWeights)) |
         bit(Region::kRankOffsets, dispatch) | bit(Region::kExpertCounts, dispatch) |
         bit(Region::kExpertOffsets, dispatch) | bit(Region::kSourceRanges, dispatch) |
         bit(Region::kBias0, biases > 0) | bit(Region::kBias1, biases > 1) | bit(Region::kOut, !dispatch) |
         bit(Region::kOutWeights, !dispatch && has_flag(call, abi::kFlagReturnWeights));
}

// Composes one of the rank's own regions. There are no branches: the lanes of a warp compose all of them.
EPD_HOST_DEVICE inline void compose_region(Operation& op, const GroupView& view, std::uint32_t region,
                                           const TakenCall& call) {
  constexpr OwnPointers kPointers;
  const bool used = ((own_regions(view, call) >> region) & 1) != 0;
  const void* const own = used ? view.regions[region].at<void>(call.slot) : nullptr;
  const std::uint32_t place = kPointers.place(region);
  void* const to = reinterpret_cast<std::uint8_t*>(&op) + place * sizeof(own);
  if (place != 0) std::memcpy(__builtin_assume_aligned(to, sizeof(own)), &own, sizeof(own));
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

// Composes what is the same for all calls but shape and inbox, and a dispatch's row format.
EPD_HOST_DEVICE inline void compose_constants(Operation& op, const GroupView& view, const TakenCall& call) {
  if (is_dispatch(call)) op.shape.format = row_format(view, call);
  op.rank = view.rank;
  op.workspace = view.workspace;
  op.workspace_bytes = view.workspace_bytes;
  op.memories = view.memories;
}

// Composes an operation without peers, work division, signal, abort and timeout, and without the places of
// its results.
inline Operation compose(const GroupView& view, const TakenCall& call) {
  Operation op;
  op.shape = view.shape;
  op.inbox = view.inbox;
  compose_constants(op, view, call);
  for (std::uint32_t region = 0; region < abi::kNumRegions; ++region) compose_region(op, view, region, call);
  compose_announcement(op, call);
  compose_routing(op, view, call);
  return op;
}

}  // namespace epd::kernels
