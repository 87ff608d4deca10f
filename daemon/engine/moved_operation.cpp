#include "moved_operation.h"

#include "base/clock.h"

#include <algorithm>

namespace epd {

using abi::OpStage;
using abi::Region;

MovedOperation::MovedOperation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
                               std::uint64_t deadline_ns, RowMover& mover, Page& page)
    : Operation(member, submission, seen_ns, deadline_ns), mover_(mover), page_(page) {}

MovedOperation::~MovedOperation() = default;

void MovedOperation::enter(OpStage stage) {
  scanned_ = 0;
  Operation::enter(stage);
}

void MovedOperation::wait_for(std::uint32_t rank) {
  const auto who = static_cast<std::int32_t>(rank);
  if (view_ == nullptr || view_->waiting_for.load(std::memory_order_relaxed) == who) return;
  view_->waiting_since_ns.store(MonotonicClock().now_ns(), std::memory_order_relaxed);
  view_->waiting_for.store(who, std::memory_order_relaxed);
}

ExchangeBlock MovedOperation::block_of(std::uint32_t rank) const {
  return {group_.ranks[rank].exchange->bytes(), group_.shape, group_.exchange_layout, number_,
          group_.active_since};
}

StepResult MovedOperation::step(std::uint64_t now_ns) {
  switch (stage()) {
    case OpStage::kPlanning: {
      if (!block_is_free()) return held_up();
      return routes() ? plan_new() : plan_known();
    }
    case OpStage::kWaitReady: return wait_ready(now_ns);
    case OpStage::kMoving: return move();
    case OpStage::kWaitArrived: return wait_arrived();
    case OpStage::kBreaking:
    case OpStage::kNone: break;
  }
  return StepResult::kIdle;
}

StepResult MovedOperation::plan_new() {
  const abi::GroupShape& s = group_.shape;
  route_ = member_.routes.renew(submission_.route);
  kernels::RoutingInput input;
  input.topk_idx = member_.user(submission_.slot, Region::kTopkIdx);
  input.index64 = s.index_type == abi::IndexType::kInt64;
  input.per_expert = s.per_expert();
  input.num_tokens = submission_.num_tokens;
  input.topk = s.topk;
  input.num_ranks = s.num_ranks;
  input.num_experts = s.num_experts;
  input.masked = group_.masked;
  const kernels::RoutingError error = kernels::build_routing_plan(input, route_->plan);
  if (error.bad) return fail(choice_failure(subject(), error.token, error.k, error.value));
  announce();
  return StepResult::kProgress;
}

StepResult MovedOperation::plan_known() {
  const bool before_its_time = submission_.handle < member_.first_index;
  route_ = before_its_time ? member_.routes.empty(submission_.handle)
                           : member_.routes.find(submission_.route, submission_.handle, member_.exchange());
  if (route_ == nullptr) return fail_stale_handle();
  if (is_dispatch() && route_->epoch < group_.changed_epoch) return fail_changed_group(route_->epoch);
  announce();
  return StepResult::kProgress;
}

void MovedOperation::announce() {
  const abi::GroupShape& s = group_.shape;
  const abi::OpAnnouncement own = announcement(route_->epoch, route_->handle);
  for (std::uint32_t d = 0; d < s.num_ranks; ++d) {
    if (!group_.active(d)) continue;
    const ExchangeBlock block = block_of(d);
    block.announcement(member_.rank) = own;
    if (routes()) {
      const kernels::RoutingPlan& plan = route_->plan;
      std::copy(plan.rank_counts.begin(), plan.rank_counts.end(), block.rank_counts(member_.rank));
      // Compact: nobody but d needs to know of its experts.
      const std::uint32_t first = s.per_expert() ? 0 : d * s.experts_per_rank();
      const std::uint32_t count = s.per_expert() ? s.num_experts : s.experts_per_rank();
      std::copy_n(plan.expert_counts.begin() + first, count, block.expert_counts(member_.rank) + first);
    }
    block.ready(member_.rank).store(tag_, std::memory_order_release);
  }
  group_.ring_peers();
  enter(OpStage::kWaitReady);
}

StepResult MovedOperation::wait_ready(std::uint64_t now_ns) {
  const ExchangeBlock own = block_of(member_.rank);
  const std::uint32_t before = scanned_;
  scanned_ = own.first_not_ready(tag_, scanned_);
  if (scanned_ < group_.shape.num_ranks) {
    wait_for(scanned_);
    return scanned_ != before ? StepResult::kProgress : StepResult::kIdle;
  }
  if (const auto different = own.disagreement(member_.rank, index_)) {
    return fail({StatusCode::kInvalidArgument, static_cast<std::int32_t>(different->rank), different->text});
  }
  if (routes()) {
    if (const kernels::PlacementError error = place(); error.bad)
      return fail(placement_failure(subject(), error));
  }
  launched_ns_ = now_ns;
  if (is_dispatch()) {
    deliver_counts();
    start_fill();
    start_dispatch();
  } else {
    start_combine();
  }
  num_dropped_ = route_->plan.num_dropped + count_lost_selections();
  enter(OpStage::kMoving);
  return StepResult::kProgress;
}

StepResult MovedOperation::move() {
  const WorkState state = works_.front()->advance();
  if (state == WorkState::kWaiting) return StepResult::kIdle;
  if (state == WorkState::kDone) works_.pop_front();
  if (!works_.empty()) return StepResult::kProgress;
  count_bytes();
  if (is_dispatch() && has(abi::kFlagDefer)) member_.publish_sent(submission_.slot, submission_.ticket);
  for (std::uint32_t d = 0; d < group_.shape.num_ranks; ++d) {
    if (!group_.active(d)) continue;
    block_of(d).arrived(member_.rank).store(tag_, std::memory_order_release);
  }
  group_.ring_peers();
  enter(OpStage::kWaitArrived);
  return StepResult::kProgress;
}

StepResult MovedOperation::wait_arrived() {
  const std::uint32_t before = scanned_;
  scanned_ = block_of(member_.rank).first_not_arrived(tag_, scanned_);
  if (scanned_ == group_.shape.num_ranks) return StepResult::kDone;
  wait_for(scanned_);
  return scanned_ != before ? StepResult::kProgress : StepResult::kIdle;
}

bool MovedOperation::runnable() const {
  switch (stage()) {
    case OpStage::kPlanning: return block_is_free();
    case OpStage::kWaitReady: return block_of(member_.rank).first_not_ready(tag_, scanned_) != scanned_;
    case OpStage::kWaitArrived: return block_of(member_.rank).first_not_arrived(tag_, scanned_) != scanned_;
    case OpStage::kMoving: return can_move();
    case OpStage::kBreaking:
    case OpStage::kNone: break;
  }
  return false;
}

void MovedOperation::abandon() {
  works_.clear();  // waits for the chunks in hand
  enter(OpStage::kBreaking);
}

StepResult MovedOperation::expire(std::uint64_t now_ns) {
  std::int32_t culprit = -1;
  std::string text = expired_text(now_ns);
  if (stage() == OpStage::kWaitReady || stage() == OpStage::kWaitArrived) {
    culprit = static_cast<std::int32_t>(scanned_);
    text += ": rank " + std::to_string(scanned_) +
            (stage() == OpStage::kWaitReady ? " has not submitted it" : " has not finished moving its rows");
  } else {
    text += stage() == OpStage::kMoving ? ": its own rows were still moving"
                                        : ": an earlier operation had not ended";
  }
  abandon();
  return fail({StatusCode::kDeadlineExceeded, culprit, text});
}

}  // namespace epd
