#include "moved_operation.h"

#include "base/clock.h"

#include <algorithm>

namespace epd {

using abi::OpStage;
using abi::Region;

namespace {

// Of a piece. A choice takes some nanoseconds, and ten times as long if its pages are new; so do a rank's
// counts for each expert.
constexpr std::uint32_t kChoices = 2048;
constexpr std::uint32_t kCounts = 8192;
constexpr std::uint32_t kRanks = 64;

}  // namespace

MovedOperation::MovedOperation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
                               std::uint64_t deadline_ns, RowMover& mover, Page& page)
    : Operation(member, submission, seen_ns, deadline_ns), mover_(mover), page_(page) {}

MovedOperation::~MovedOperation() {
  works_.clear();
  planner_.reset();
  placer_.reset();
  member_.routes.give_back(std::move(route_));
}

void MovedOperation::enter(OpStage stage) {
  scanned_ = 0;
  Operation::enter(stage);
}

void MovedOperation::begin(Part part) {
  part_ = part;
  done_ = 0;
}

StepResult MovedOperation::next(Part part) {
  begin(part);
  return StepResult::kProgress;
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
  if (stage() == OpStage::kBreaking) return StepResult::kIdle;
  switch (part_) {
    case Part::kBegin: return may_plan() ? begin_plan() : held_up();
    case Part::kPlan: return plan();
    case Part::kAnnounce: return announce();
    case Part::kAwait: return wait_ready();
    case Part::kAgree: return agree();
    case Part::kKeep: return keep();
    case Part::kStart: return start(now_ns);
    case Part::kMove: return move();
    case Part::kArrive: return arrive();
    case Part::kAwaitArrived: return wait_arrived();
  }
  return StepResult::kIdle;
}

// In the order of submission: what is read back from a record must not be overwritten by what came later.
bool MovedOperation::may_plan() const {
  if (!block_is_free()) return false;
  for (const Operation* operation : member_.operations) {
    if (operation == this) return true;
    if (operation->stage() == OpStage::kPlanning) return false;
  }
  return true;
}

StepResult MovedOperation::begin_plan() {
  if (!routes()) return find_known();
  plan_new();
  return next(Part::kPlan);
}

void MovedOperation::plan_new() {
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
  planner_.emplace(input, route_->plan);
}

// In memory, or else in its record.
StepResult MovedOperation::find_known() {
  const std::uint64_t handle = submission_.handle;
  const std::uint32_t record = submission_.route;
  route_ = handle < member_.first_index ? member_.routes.empty(handle) : member_.routes.find(record, handle);
  if (route_ == nullptr) {
    const auto saved = member_.routes.saved(record, handle, member_.exchange());
    if (!saved) return fail_stale_handle();
    route_ = member_.routes.renew(record);
    restores_ = true;
    planner_.emplace(*saved, route_->plan);
    return next(Part::kPlan);
  }
  if (is_dispatch() && route_->epoch < group_.changed_epoch) return fail_changed_group(route_->epoch);
  return next(Part::kAnnounce);
}

StepResult MovedOperation::plan() {
  if (!planner_->advance(std::max(1u, kChoices / group_.shape.topk))) return StepResult::kProgress;
  const kernels::RoutingError error = planner_->error();
  planner_.reset();
  if (restores_) {
    if (error.bad ||
        !member_.routes.restore(submission_.route, submission_.handle, member_.exchange(), route_))
      return fail_stale_handle();
    if (is_dispatch() && route_->epoch < group_.changed_epoch) return fail_changed_group(route_->epoch);
  } else if (error.bad) {
    return fail(choice_failure(subject(), error.token, error.k, error.value));
  }
  return next(Part::kAnnounce);
}

StepResult MovedOperation::announce() {
  const abi::OpAnnouncement own = announcement(route_->epoch, route_->handle);
  const std::uint32_t ranks = group_.shape.num_ranks;
  const std::uint32_t words = routes() ? ranks + group_.shape.num_experts : kCounts / kRanks;
  const std::uint32_t end = std::min(ranks, done_ + std::max(1u, kCounts / words));
  for (; done_ < end; ++done_) {
    if (group_.active(done_)) announce_to(done_, own);
  }
  if (done_ < ranks) return StepResult::kProgress;
  group_.ring_peers();
  enter(OpStage::kWaitReady);
  return next(Part::kAwait);
}

void MovedOperation::announce_to(std::uint32_t rank, const abi::OpAnnouncement& own) {
  const abi::GroupShape& s = group_.shape;
  const ExchangeBlock block = block_of(rank);
  block.announcement(member_.rank) = own;
  if (routes()) {
    const kernels::RoutingPlan& plan = route_->plan;
    std::copy(plan.rank_counts.begin(), plan.rank_counts.end(), block.rank_counts(member_.rank));
    // Compact: nobody but the rank needs to know of its experts.
    const std::uint32_t first = s.per_expert() ? 0 : rank * s.experts_per_rank();
    const std::uint32_t count = s.per_expert() ? s.num_experts : s.experts_per_rank();
    std::copy_n(plan.expert_counts.begin() + first, count, block.expert_counts(member_.rank) + first);
  }
  block.ready(member_.rank).store(tag_, std::memory_order_release);
}

StepResult MovedOperation::wait_ready() {
  const std::uint32_t before = scanned_;
  scanned_ = block_of(member_.rank).first_not_ready(tag_, scanned_);
  if (scanned_ < group_.shape.num_ranks) {
    wait_for(scanned_);
    return scanned_ != before ? StepResult::kProgress : StepResult::kIdle;
  }
  if (routes()) begin_placing();
  return next(Part::kAgree);
}

StepResult MovedOperation::agree() {
  const abi::GroupShape& s = group_.shape;
  const std::uint32_t piece = std::clamp(kCounts / s.num_experts, 1u, kRanks);
  const std::uint32_t end = std::min(s.num_ranks, done_ + piece);
  if (const auto different = block_of(member_.rank).disagreement(member_.rank, index_, done_, end)) {
    return fail({StatusCode::kInvalidArgument, static_cast<std::int32_t>(different->rank), different->text});
  }
  done_ = end;
  if (routes()) placer_->advance(piece);
  if (done_ < s.num_ranks) return StepResult::kProgress;
  if (!routes()) return next(Part::kStart);
  const kernels::PlacementError error = placer_->error();
  placer_.reset();
  if (error.bad) return fail(placement_failure(subject(), error));
  route_->epoch = group_.epoch;
  route_->handle = number_ + 1;
  member_.routes.begin_keep(submission_.route, *route_, member_.exchange());
  return next(Part::kKeep);
}

StepResult MovedOperation::keep() {
  RouteTable& table = member_.routes;
  if (!table.keep_choices(submission_.route, *route_, member_.exchange(), kept_))
    return StepResult::kProgress;
  table.end_keep(submission_.route, route_, member_.exchange());
  return next(Part::kStart);
}

StepResult MovedOperation::start(std::uint64_t now_ns) {
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
  return next(Part::kMove);
}

StepResult MovedOperation::move() {
  const WorkState state = works_.front()->advance();
  if (state == WorkState::kWaiting) return StepResult::kIdle;
  if (state == WorkState::kDone) works_.pop_front();
  if (!works_.empty()) return StepResult::kProgress;
  count_bytes();
  if (is_dispatch() && has(abi::kFlagDefer)) member_.publish_sent(submission_.slot, submission_.ticket);
  return next(Part::kArrive);
}

StepResult MovedOperation::arrive() {
  const std::uint32_t end = std::min(group_.shape.num_ranks, done_ + kRanks);
  for (; done_ < end; ++done_) {
    if (group_.active(done_)) block_of(done_).arrived(member_.rank).store(tag_, std::memory_order_release);
  }
  if (done_ < group_.shape.num_ranks) return StepResult::kProgress;
  group_.ring_peers();
  enter(OpStage::kWaitArrived);
  return next(Part::kAwaitArrived);
}

StepResult MovedOperation::wait_arrived() {
  const std::uint32_t before = scanned_;
  scanned_ = block_of(member_.rank).first_not_arrived(tag_, scanned_);
  if (scanned_ == group_.shape.num_ranks) return StepResult::kDone;
  wait_for(scanned_);
  return scanned_ != before ? StepResult::kProgress : StepResult::kIdle;
}

bool MovedOperation::runnable() const {
  if (stage() == OpStage::kBreaking) return false;
  switch (part_) {
    case Part::kBegin: return may_plan();
    case Part::kAwait: return block_of(member_.rank).first_not_ready(tag_, scanned_) != scanned_;
    case Part::kAwaitArrived: return block_of(member_.rank).first_not_arrived(tag_, scanned_) != scanned_;
    case Part::kMove: return can_move();
    default: return true;
  }
}

void MovedOperation::abandon() {
  works_.clear();  // waits for the chunks in hand
  enter(OpStage::kBreaking);
}

// Of the ranks that are missing one whose engine stands still, else the first: a rank may well have submitted
// what its engine has not taken.
std::uint32_t MovedOperation::whom_to_blame(std::uint64_t now_ns) const {
  const bool ready = stage() == OpStage::kWaitReady;
  const ExchangeBlock own = block_of(member_.rank);
  const auto next = [&](std::uint32_t from) {
    return ready ? own.first_not_ready(tag_, from) : own.first_not_arrived(tag_, from);
  };
  for (std::uint32_t rank = next(0); rank < group_.shape.num_ranks; rank = next(rank + 1)) {
    if (group_.stands_still_ms(rank, now_ns, seen_ns_) != 0) return rank;
  }
  return scanned_;
}

StepResult MovedOperation::expire(std::uint64_t now_ns) {
  std::int32_t culprit = -1;
  std::string text = expired_text(now_ns);
  if (stage() == OpStage::kWaitReady || stage() == OpStage::kWaitArrived) {
    const std::uint32_t rank = whom_to_blame(now_ns);
    culprit = static_cast<std::int32_t>(rank);
    text += ": " + awaited_text(rank, group_.stands_still_ms(rank, now_ns, seen_ns_),
                                stage() == OpStage::kWaitReady ? "has not submitted it"
                                                               : "has not finished moving its rows");
  } else {
    text += stage() == OpStage::kMoving ? ": its own rows were still moving"
                                        : ": an earlier operation had not ended";
  }
  abandon();
  return fail({StatusCode::kDeadlineExceeded, culprit, text});
}

}  // namespace epd
