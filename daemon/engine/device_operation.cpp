#include "device_operation.h"

#include "proto/route_memory.h"

#include <algorithm>

namespace epd {

using abi::Region;
using kernels::cuda::Kind;

namespace {

template <typename T>
T* at(std::byte* base, std::uint64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

kernels::RowFormat row_format(const abi::GroupShape& s) {
  kernels::RowFormat format;
  format.cast = s.payload == abi::Payload::kFp8Cast;
  format.scales = s.scale_format;
  format.hidden = s.hidden;
  format.x_bytes = s.x_bytes();
  format.row_bytes = s.row_bytes();
  format.scale_bytes = s.scale_bytes();
  return format;
}

kernels::cuda::Shape device_shape(const abi::GroupShape& s) {
  kernels::cuda::Shape shape;
  shape.num_ranks = s.num_ranks;
  shape.num_experts = s.num_experts;
  shape.topk = s.topk;
  shape.hidden = s.hidden;
  shape.per_expert = s.per_expert();
  shape.expert_blocks = s.layout == abi::Layout::kExpert;
  shape.index64 = s.index_type == abi::IndexType::kInt64;
  shape.alignment = s.expert_alignment;
  shape.expert_capacity = s.expert_capacity();
  shape.recv_rows = s.recv_rows();
  shape.format = row_format(s);
  return shape;
}

class Describer {
 public:
  Describer(const Member& member, const abi::Submission& submission, const OperationPlace& place)
      : member_(member),
        group_(member.group),
        submission_(submission),
        number_(place.number),
        announcement_(place.announcement),
        route_(place.route) {}

  void describe(kernels::cuda::Operation& op) const;

 private:
  bool has(abi::OpFlags flag) const { return (submission_.flags & flag) != 0; }
  bool is_dispatch() const { return submission_.op == abi::Op::kDispatch; }
  bool routes() const { return makes_routing(submission_); }
  void describe_dispatch(kernels::cuda::Operation& op) const;
  void describe_combine(kernels::cuda::Operation& op) const;

  const Member& member_;
  const Group& group_;
  const abi::Submission& submission_;
  const std::uint64_t number_;
  const abi::OpAnnouncement& announcement_;
  const RouteHeads::Place& route_;
};

void Describer::describe(kernels::cuda::Operation& op) const {
  const abi::ExchangeArenaLayout& layout = group_.exchange_layout;
  op.shape = device_shape(group_.shape);
  op.rank = member_.rank;
  op.num_tokens = route_.head.num_tokens;
  op.tag = announcement_.tag;
  op.announcement = announcement_;
  op.announcement.num_tokens = op.num_tokens;
  op.landing = kernels::cuda::landing_of(group_.shape);
  op.routing.topk = at<std::int32_t>(route_.half, layout.topk);
  op.routing.rows = at<std::int32_t>(route_.half, layout.rows);
  op.routing.placement = at<std::int32_t>(route_.half, layout.placement);
  if (has(abi::kFlagWeights)) {
    op.topk_weights = reinterpret_cast<const float*>(member_.user(submission_.slot, Region::kTopkWeights));
  }
  if (is_dispatch()) {
    describe_dispatch(op);
  } else {
    describe_combine(op);
  }
}

void Describer::describe_dispatch(kernels::cuda::Operation& op) const {
  const std::uint32_t slot = submission_.slot;
  const auto mine = [&]<typename T>(Region region, T*& pointer) {
    if (abi::region_bytes(group_.shape, region) != 0)
      pointer = reinterpret_cast<T*>(member_.user(slot, region));
  };
  op.cached = !routes();
  op.mark_unused = has(abi::kFlagMarkUnused);
  op.zero_padding = has(abi::kFlagZeroPadding);
  op.topk_idx = member_.user(slot, Region::kTopkIdx);
  op.x = member_.user(slot, Region::kX);
  if (group_.shape.payload == abi::Payload::kFp8) op.x_scales = member_.user(slot, Region::kXScales);
  mine(Region::kRankOffsets, op.counts.rank_offsets);
  mine(Region::kExpertCounts, op.counts.expert_counts);
  mine(Region::kExpertOffsets, op.counts.expert_offsets);
  mine(Region::kSourceRanges, op.counts.source_ranges);
  if (!routes()) return;
  op.routing.head = at<abi::RoutingRecord>(route_.half, 0);
  op.routing.handle = number_ + 1;
  op.routing.epoch = route_.head.epoch;
}

void Describer::describe_combine(kernels::cuda::Operation& op) const {
  const std::uint32_t slot = submission_.slot;
  const std::uint32_t biases = (submission_.flags & abi::kFlagBiases) >> abi::kBiasShift;
  constexpr Region kBiases[] = {Region::kBias0, Region::kBias1};
  for (std::uint32_t i = 0; i < std::min<std::uint32_t>(biases, 2); ++i) {
    op.bias[i] = reinterpret_cast<const std::uint16_t*>(member_.user(slot, kBiases[i]));
  }
  op.out = reinterpret_cast<std::uint16_t*>(member_.user(slot, Region::kOut));
  if (has(abi::kFlagReturnWeights)) {
    op.out_weights = reinterpret_cast<float*>(member_.user(slot, Region::kOutWeights));
  }
}

}  // namespace

LaneShape lane_shape(const abi::GroupShape& shape, std::int32_t priority) {
  return {device_shape(shape),
          shape.depth,
          static_cast<std::uint32_t>(abi::placement_words(shape)),
          shape.num_biases,
          priority,
          false,
          static_cast<std::uint32_t>(shape.num_routes()),
          abi::kept_routes(shape)};
}

kernels::cuda::Operation describe(const Member& member, const abi::Submission& submission,
                                  const OperationPlace& place) {
  kernels::cuda::Operation op;
  Describer(member, submission, place).describe(op);
  return op;
}

kernels::cuda::Peer describe_peer(const Group& group, const abi::Submission& submission, std::uint32_t rank,
                                  std::uint64_t number, std::uint64_t routing_epoch) {
  const abi::ExchangeArenaLayout& layout = group.exchange_layout;
  const GroupRankMemory& memory = group.ranks[rank];
  std::byte* arena = memory.exchange->bytes();
  std::byte* block = arena + layout.block(number, group.shape.depth);
  kernels::cuda::Peer peer;
  peer.ready = at<abi::SignalLine>(block, layout.ready);
  peer.arrived = at<abi::SignalLine>(block, layout.arrived);
  peer.announcement = at<abi::OpAnnouncement>(block, layout.announcement);
  peer.rank_counts = at<std::uint32_t>(block, layout.rank_counts);
  peer.expert_counts = at<std::uint32_t>(block, layout.expert_counts);
  if (layout.landing_bytes != 0)
    peer.landing = at<std::uint8_t>(arena, layout.landing(number, group.shape.depth));
  const auto its = [&](Region region) { return memory.at(submission.slot, region); };
  if (submission.op == abi::Op::kDispatch) {
    peer.target = {its(Region::kRecvX), its(Region::kRecvScales), its(Region::kRecvTopkIdx),
                   at<float>(its(Region::kRecvTopkWeights), 0), at<std::int32_t>(its(Region::kRecvSrc), 0)};
  } else if (group.serves(rank, routing_epoch)) {  // one that was lost since has none of its rows
    const bool weights = (submission.flags & abi::kFlagReturnWeights) != 0;
    peer.source = {at<const std::uint16_t>(its(Region::kY), 0),
                   weights ? at<const float>(its(Region::kYWeights), 0) : nullptr};
  }
  return peer;
}

Kind kind_of(abi::Op op) {
  if (op == abi::Op::kNoop) return Kind::kNoop;
  return op == abi::Op::kDispatch ? Kind::kDispatch : Kind::kCombine;
}

}  // namespace epd
