#include "operation.h"

#include "base/clock.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace epd {

using abi::OpStage;
using abi::Region;

std::uint32_t saturated_us(std::uint64_t from_ns, std::uint64_t to_ns) {
  if (to_ns <= from_ns) return 0;
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>((to_ns - from_ns) / 1000, std::numeric_limits<std::uint32_t>::max()));
}

Operation::Operation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
                     std::uint64_t deadline_ns)
    : member_(member),
      group_(member.group),
      submission_(submission),
      index_(member.next_number),
      tag_(abi::op_tag(member.group.epoch, index_)),
      seen_ns_(seen_ns),
      deadline_ns_(deadline_ns) {}

Operation::~Operation() {
  Page::release(view_);
}

void Operation::show(abi::OpView* view) {
  view_ = view;
  view_->epoch = group_.epoch;
  view_->seen_ns = seen_ns_;
  view_->deadline_ns = deadline_ns_;
  enter(stage_);
}

void Operation::enter(OpStage stage) {
  stage_ = stage;
  scanned_ = 0;
  if (view_ == nullptr) return;
  const std::uint64_t now = MonotonicClock().now_ns();  // the round of the loop may have begun long ago
  view_->stage_ns[static_cast<std::size_t>(stage)].store(now, std::memory_order_relaxed);
  view_->stage.store(static_cast<std::uint32_t>(stage), std::memory_order_relaxed);
  view_->waiting_for.store(-1, std::memory_order_relaxed);
  view_->waiting_since_ns.store(0, std::memory_order_relaxed);
}

void Operation::wait_for(std::uint32_t rank) {
  const auto who = static_cast<std::int32_t>(rank);
  if (view_ == nullptr || view_->waiting_for.load(std::memory_order_relaxed) == who) return;
  view_->waiting_since_ns.store(MonotonicClock().now_ns(), std::memory_order_relaxed);
  view_->waiting_for.store(who, std::memory_order_relaxed);
}

StepResult Operation::held_up() {
  if (!std::exchange(held_up_, true)) count_stall(member_, abi::Stall::kDepth);
  return StepResult::kIdle;
}

ExchangeBlock Operation::block_of(std::uint32_t rank) const {
  return {group_.ranks[rank].exchange.bytes(), group_.shape, group_.exchange_layout, index_,
          group_.active_since};
}

StepResult Operation::fail(StatusCode cause, std::int32_t culprit, const std::string& text) {
  failure_ = {};
  failure_.group_id = group_.id;
  failure_.epoch = group_.epoch;
  failure_.cause = cause;
  failure_.culprit_rank = culprit;
  abi::set_text(failure_.text, text.data(), text.size());
  enter(OpStage::kBreaking);
  return StepResult::kFailed;
}

StepResult Operation::step(Device& device, Page& page, std::uint64_t now_ns) {
  switch (stage_) {
    case OpStage::kPlanning: {
      // A block serves the operations `depth` apart; its former user must be done everywhere.
      if (member_.next_index() + group_.shape.depth <= index_) return held_up();
      return routes() ? plan_new() : plan_known();
    }
    case OpStage::kWaitReady: return wait_ready(device, now_ns);
    case OpStage::kMoving: return move(page);
    case OpStage::kWaitArrived: return wait_arrived();
    case OpStage::kBreaking:
    case OpStage::kNone: break;
  }
  return StepResult::kIdle;
}

StepResult Operation::plan_new() {
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
  if (error.bad) {
    return fail(StatusCode::kInvalidArgument, static_cast<std::int32_t>(member_.rank),
                "operation " + std::to_string(index_) + ": topk_idx[" + std::to_string(error.token) + "," +
                    std::to_string(error.k) + "] is " + std::to_string(error.value) + " on rank " +
                    std::to_string(member_.rank) + "; allowed: -1 .. " + std::to_string(s.num_experts - 1));
  }
  announce();
  return StepResult::kProgress;
}

StepResult Operation::plan_known() {
  const bool before_its_time = submission_.handle < member_.first_index;
  route_ = before_its_time ? member_.routes.empty(submission_.handle)
                           : member_.routes.find(submission_.route, submission_.handle, member_.exchange());
  if (route_ != nullptr && is_dispatch() && route_->epoch < group_.changed_epoch) {
    return fail(StatusCode::kNotFound, -1,
                "operation " + std::to_string(index_) + ": the routing of dispatch " +
                    std::to_string(submission_.handle) + " is of epoch " + std::to_string(route_->epoch) +
                    ", and ranks were lost or joined in epoch " + std::to_string(group_.changed_epoch) +
                    "; allowed: a new routing, or one made since");
  }
  if (route_ == nullptr) {
    return fail(StatusCode::kNotFound, static_cast<std::int32_t>(member_.rank),
                "operation " + std::to_string(index_) + ": " + op_name(submission_.op) + " on slot " +
                    std::to_string(submission_.slot) + " names the routing of dispatch " +
                    std::to_string(submission_.handle) + ", which record " +
                    std::to_string(submission_.route) + " of rank " + std::to_string(member_.rank) +
                    " does not hold; allowed: the last completed dispatch of that record");
  }
  announce();
  return StepResult::kProgress;
}

void Operation::announce() {
  const abi::GroupShape& s = group_.shape;
  abi::OpAnnouncement own{};
  own.tag = tag_;
  own.op = static_cast<std::uint32_t>(submission_.op);
  own.slot = submission_.slot;
  own.routing = routes() ? 0 : abi::op_tag(route_->epoch, submission_.handle);
  own.num_tokens = submission_.num_tokens;
  own.flags = submission_.flags;
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

StepResult Operation::wait_ready(Device& device, std::uint64_t now_ns) {
  const ExchangeBlock own = block_of(member_.rank);
  const std::uint32_t before = scanned_;
  scanned_ = own.first_not_ready(tag_, scanned_);
  if (scanned_ < group_.shape.num_ranks) {
    wait_for(scanned_);
    return scanned_ != before ? StepResult::kProgress : StepResult::kIdle;
  }
  if (const auto different = own.disagreement(member_.rank, index_)) {
    return fail(StatusCode::kInvalidArgument, static_cast<std::int32_t>(different->rank), different->text);
  }
  if (routes()) {
    if (const kernels::PlacementError error = place(); error.bad) return fail_placement(error);
  }
  launched_ns_ = now_ns;
  if (is_dispatch()) {
    deliver_counts();
    start_fill(device);
    start_dispatch(device);
  } else {
    start_combine(device);
  }
  num_dropped_ = route_->plan.num_dropped + count_lost_selections();
  enter(OpStage::kMoving);
  return StepResult::kProgress;
}

StepResult Operation::move(Page& page) {
  const WorkState state = works_.front()->advance();
  if (state == WorkState::kWaiting) return StepResult::kIdle;
  if (state == WorkState::kDone) works_.pop_front();
  if (!works_.empty()) return StepResult::kProgress;
  count_bytes(page);
  if (is_dispatch() && has(abi::kFlagDefer)) member_.publish_sent(submission_.slot, submission_.ticket);
  for (std::uint32_t d = 0; d < group_.shape.num_ranks; ++d) {
    if (!group_.active(d)) continue;
    block_of(d).arrived(member_.rank).store(tag_, std::memory_order_release);
  }
  group_.ring_peers();
  enter(OpStage::kWaitArrived);
  return StepResult::kProgress;
}

StepResult Operation::wait_arrived() {
  const std::uint32_t before = scanned_;
  scanned_ = block_of(member_.rank).first_not_arrived(tag_, scanned_);
  if (scanned_ == group_.shape.num_ranks) return StepResult::kDone;
  wait_for(scanned_);
  return scanned_ != before ? StepResult::kProgress : StepResult::kIdle;
}

bool Operation::runnable() const {
  switch (stage_) {
    case OpStage::kPlanning: return member_.next_index() + group_.shape.depth > index_;
    case OpStage::kWaitReady: return block_of(member_.rank).first_not_ready(tag_, scanned_) != scanned_;
    case OpStage::kWaitArrived: return block_of(member_.rank).first_not_arrived(tag_, scanned_) != scanned_;
    case OpStage::kMoving: return can_move();
    case OpStage::kBreaking:
    case OpStage::kNone: break;
  }
  return false;
}

void Operation::abandon() {
  works_.clear();  // waits for the chunks in hand
  enter(OpStage::kBreaking);
}

abi::Break Operation::deadline_failure(std::uint64_t now_ns) const {
  abi::Break failure{};
  failure.group_id = group_.id;
  failure.epoch = group_.epoch;
  failure.cause = StatusCode::kDeadlineExceeded;
  failure.culprit_rank = -1;
  std::string text = "operation " + std::to_string(index_) + " (" + op_name(submission_.op) + ", slot " +
                     std::to_string(submission_.slot) + ") of rank " + std::to_string(member_.rank) +
                     " ended after " + std::to_string((now_ns - seen_ns_) / 1'000'000) + " ms";
  if (stage_ == OpStage::kWaitReady || stage_ == OpStage::kWaitArrived) {
    failure.culprit_rank = static_cast<std::int32_t>(scanned_);
    text += ": rank " + std::to_string(scanned_) +
            (stage_ == OpStage::kWaitReady ? " has not submitted it" : " has not finished moving its rows");
  } else {
    text += stage_ == OpStage::kMoving ? ": its own rows were still moving"
                                       : ": an earlier operation had not ended";
  }
  abi::set_text(failure.text, text.data(), text.size());
  return failure;
}

abi::Completion Operation::completion(StatusCode status, std::int32_t culprit, std::uint64_t now_ns) const {
  abi::Completion c{};
  c.ticket = submission_.ticket;
  c.op_index = index_;
  c.status = status;
  c.culprit_rank = culprit;
  c.member = submission_.member;
  c.slot = submission_.slot;
  c.num_recv_rows = num_recv_rows_;
  if (status == StatusCode::kOk) c.num_dropped_selections = num_dropped_;
  c.seen_us = saturated_us(submission_.submit_ns, seen_ns_);
  c.launched_us = launched_ns_ == 0 ? 0 : saturated_us(submission_.submit_ns, launched_ns_);
  c.done_us = saturated_us(submission_.submit_ns, now_ns);
  return c;
}

}  // namespace epd
