// MovedOperation: from everybody's counts to work of the device.

#include "moved_operation.h"

#include <algorithm>

namespace epd {

using abi::Region;

namespace {

template <typename T>
T* in_arena(std::byte* place) {
  return reinterpret_cast<T*>(place);
}

}  // namespace

kernels::PlacementError MovedOperation::place() {
  const std::uint32_t ranks = group_.shape.num_ranks;
  const ExchangeBlock own = block_of(member_.rank);
  std::vector<const std::uint32_t*> rank_counts(ranks);
  std::vector<const std::uint32_t*> expert_counts(ranks);
  for (std::uint32_t source = 0; source < ranks; ++source) {
    if (!group_.active(source)) continue;
    rank_counts[source] = own.rank_counts(source);
    expert_counts[source] = own.expert_counts(source);
  }
  const kernels::PlacementError error = kernels::place_rows(
      placement_rules(group_.shape), {rank_counts, expert_counts}, member_.rank, route_->placement);
  if (error.bad) return error;
  route_->epoch = group_.epoch;
  route_->handle = number_ + 1;
  member_.routes.keep(submission_.route, route_, member_.exchange());
  return error;
}

// To the regions and to the board, for the CPU.
void MovedOperation::deliver_counts() {
  const std::uint32_t slot = submission_.slot;
  const kernels::Placement& placement = route_->placement;
  const auto put = [&](Region region, std::span<const std::int32_t> values) {
    std::copy(values.begin(), values.end(), in_arena<std::int32_t>(member_.user(slot, region)));
  };
  put(Region::kRankOffsets, placement.rank_offsets());
  put(Region::kExpertCounts, placement.expert_counts());
  put(Region::kExpertOffsets, placement.expert_offsets());
  put(Region::kSourceRanges, placement.source_ranges());
  num_recv_rows_ = placement.num_recv_rows;
  member_.publish_counts(slot, submission_.ticket, placement);
}

kernels::DispatchTarget MovedOperation::target_at(std::uint32_t rank) const {
  const auto at = [&](Region region) { return group_.ranks[rank].at(submission_.slot, region); };
  return {at(Region::kRecvX), at(Region::kRecvScales), at(Region::kRecvTopkIdx),
          in_arena<float>(at(Region::kRecvTopkWeights)), in_arena<std::int32_t>(at(Region::kRecvSrc))};
}

void MovedOperation::start_dispatch() {
  const abi::GroupShape& s = group_.shape;
  const std::uint32_t slot = submission_.slot;
  targets_.resize(s.num_ranks);
  for (std::uint32_t d = 0; d < s.num_ranks; ++d) {
    if (group_.active(d)) targets_[d] = target_at(d);
  }
  kernels::DispatchArgs args;
  args.plan = &route_->plan;
  args.base = route_->placement.base();
  args.x = member_.user(slot, Region::kX);
  if (s.payload == abi::Payload::kFp8) args.x_scales = member_.user(slot, Region::kXScales);
  if (has(abi::kFlagWeights)) {
    args.topk_weights = in_arena<const float>(member_.user(slot, Region::kTopkWeights));
  }
  args.targets = targets_;
  args.format = row_format(s);
  args.source_rank = member_.rank;
  args.topk = s.topk;
  args.experts_per_rank = s.experts_per_rank();
  args.index64 = s.index_type == abi::IndexType::kInt64;
  works_.push_back(mover_.dispatch(args, share()));
}

void MovedOperation::start_fill() {
  const abi::GroupShape& s = group_.shape;
  if (s.layout != abi::Layout::kPacked && !has(abi::kFlagMarkUnused)) return;
  unfilled_ = kernels::unfilled_rows(placement_rules(s), route_->placement, has(abi::kFlagMarkUnused));
  if (unfilled_.empty()) return;
  kernels::FillArgs args;
  args.target = target_at(member_.rank);
  args.ranges = unfilled_;
  args.format = row_format(s);
  args.choices_per_row = s.choices_per_row();
  args.index64 = s.index_type == abi::IndexType::kInt64;
  args.zero = has(abi::kFlagZeroPadding);
  works_.push_back(mover_.fill(args, share()));
}

void MovedOperation::start_combine() {
  const abi::GroupShape& s = group_.shape;
  const std::uint32_t slot = submission_.slot;
  sources_.resize(s.num_ranks);
  for (std::uint32_t d = 0; d < s.num_ranks; ++d) {
    // A rank that was lost since the dispatch has none of its rows, even if it is back.
    if (!group_.serves(d, route_->epoch)) continue;
    sources_[d] = {in_arena<const std::uint16_t>(group_.ranks[d].at(slot, Region::kY)),
                   in_arena<const float>(group_.ranks[d].at(slot, Region::kYWeights))};
  }
  kernels::CombineArgs args;
  args.plan = &route_->plan;
  args.base = route_->placement.base();
  args.sources = sources_;
  if (has(abi::kFlagWeights)) {
    args.topk_weights = in_arena<const float>(member_.user(slot, Region::kTopkWeights));
  }
  const std::uint32_t biases = (submission_.flags & abi::kFlagBiases) >> abi::kBiasShift;
  if (biases > 0) args.bias[0] = in_arena<const std::uint16_t>(member_.user(slot, Region::kBias0));
  if (biases > 1) args.bias[1] = in_arena<const std::uint16_t>(member_.user(slot, Region::kBias1));
  args.out = in_arena<std::uint16_t>(member_.user(slot, Region::kOut));
  if (has(abi::kFlagReturnWeights)) {
    args.out_weights = in_arena<float>(member_.user(slot, Region::kOutWeights));
  }
  args.hidden = s.hidden;
  args.topk = s.topk;
  args.experts_per_rank = s.experts_per_rank();
  works_.push_back(mover_.combine(args, share()));
}

// Selections whose rows went to ranks that were lost since.
std::uint32_t MovedOperation::count_lost_selections() const {
  if (route_->epoch >= group_.changed_epoch) return 0;
  std::uint32_t lost = 0;
  for (const std::int32_t choice : route_->plan.topk) {
    if (choice < 0) continue;
    const auto rank = static_cast<std::uint32_t>(choice) / group_.shape.experts_per_rank();
    lost += group_.serves(rank, route_->epoch) ? 0 : 1;
  }
  return lost;
}

void MovedOperation::count_bytes() const {
  const abi::GroupShape& s = group_.shape;
  const std::uint64_t rows = route_->plan.entries.size();
  if (is_dispatch()) {
    count_moved(page_, member_, submission_.op, rows * (std::uint64_t{s.row_bytes()} + s.scale_bytes()));
  } else {
    count_moved(page_, member_, submission_.op, rows * s.hidden * 2);
  }
}

}  // namespace epd
