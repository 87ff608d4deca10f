#include "operation.h"

#include "base/clock.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace epd {

using abi::Op;
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
      return submission_.op == Op::kDispatch ? plan_dispatch() : plan_combine();
    }
    case OpStage::kWaitReady: return wait_ready(device, now_ns);
    case OpStage::kMoving: return move(page);
    case OpStage::kWaitArrived: return wait_arrived();
    case OpStage::kBreaking:
    case OpStage::kNone: break;
  }
  return StepResult::kIdle;
}

StepResult Operation::plan_dispatch() {
  const abi::GroupShape& s = group_.shape;
  Route& route = member_.routes[submission_.slot];
  route.handle = 0;
  route.epoch = group_.epoch;
  kernels::RoutingInput input;
  input.topk_idx = member_.user(submission_.slot, Region::kTopkIdx);
  input.index64 = s.index_type == abi::IndexType::kInt64;
  input.num_tokens = submission_.num_tokens;
  input.topk = s.topk;
  input.num_ranks = s.num_ranks;
  input.num_experts = s.num_experts;
  input.masked = group_.masked;
  const kernels::RoutingError error = kernels::build_routing_plan(input, route.plan);
  if (error.bad) {
    return fail(StatusCode::kInvalidArgument, static_cast<std::int32_t>(member_.rank),
                "operation " + std::to_string(index_) + ": topk_idx[" + std::to_string(error.token) + "," +
                    std::to_string(error.k) + "] is " + std::to_string(error.value) + " on rank " +
                    std::to_string(member_.rank) + "; allowed: -1 .. " + std::to_string(s.num_experts - 1));
  }
  route_ = &route;
  announce(route);
  return StepResult::kProgress;
}

StepResult Operation::plan_combine() {
  route_ = member_.find_route(submission_.slot, submission_.handle);
  if (route_ == nullptr) {
    return fail(StatusCode::kNotFound, static_cast<std::int32_t>(member_.rank),
                "operation " + std::to_string(index_) + ": combine on slot " +
                    std::to_string(submission_.slot) + " names dispatch " +
                    std::to_string(submission_.handle) + " on rank " + std::to_string(member_.rank) +
                    "; allowed: the last completed dispatch of that slot");
  }
  announce(*route_);
  return StepResult::kProgress;
}

void Operation::announce(const Route& route) {
  const abi::GroupShape& s = group_.shape;
  const bool dispatch = submission_.op == Op::kDispatch;
  abi::OpAnnouncement own{};
  own.tag = tag_;
  own.op = static_cast<std::uint32_t>(submission_.op);
  own.slot = submission_.slot;
  own.handle = dispatch ? 0 : submission_.handle;
  own.num_tokens = submission_.num_tokens;
  own.flags = submission_.flags;
  for (std::uint32_t d = 0; d < s.num_ranks; ++d) {
    if (!group_.active(d)) continue;
    const ExchangeBlock block = block_of(d);
    block.announcement(member_.rank) = own;
    if (dispatch) {
      const std::uint32_t experts = s.experts_per_rank();
      std::memcpy(block.rank_counts(member_.rank), route.plan.rank_counts.data(),
                  s.num_ranks * sizeof(std::uint32_t));
      std::memcpy(block.expert_counts(member_.rank),
                  route.plan.expert_counts.data() + std::size_t{d} * experts,
                  experts * sizeof(std::uint32_t));
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
  launched_ns_ = now_ns;
  return submission_.op == Op::kDispatch ? launch_dispatch(device) : launch_combine(device);
}

StepResult Operation::launch_dispatch(Device& device) {
  const abi::GroupShape& s = group_.shape;
  const std::uint32_t slot = submission_.slot;
  const ExchangeBlock own = block_of(member_.rank);

  // Column prefixes of the count matrix: where my rows begin at each rank, and everybody's at mine.
  std::vector<std::uint32_t>& base = route_->base_rows;
  base.assign(s.num_ranks, 0);
  for (std::uint32_t source = 0; source < member_.rank; ++source) {
    if (!group_.active(source)) continue;
    const std::uint32_t* row = own.rank_counts(source);
    for (std::uint32_t d = 0; d < s.num_ranks; ++d) base[d] += row[d];
  }
  std::vector<std::int32_t> offsets(s.num_ranks + 1, 0);
  std::vector<std::int32_t> experts(s.experts_per_rank(), 0);
  for (std::uint32_t source = 0; source < s.num_ranks; ++source) {
    offsets[source + 1] = offsets[source];
    if (!group_.active(source)) continue;
    offsets[source + 1] += static_cast<std::int32_t>(own.rank_counts(source)[member_.rank]);
    const std::uint32_t* counts = own.expert_counts(source);
    for (std::size_t e = 0; e < experts.size(); ++e) experts[e] += static_cast<std::int32_t>(counts[e]);
  }
  num_recv_rows_ = static_cast<std::uint32_t>(offsets.back());
  std::memcpy(member_.user(slot, Region::kRankOffsets), offsets.data(),
              offsets.size() * sizeof(std::int32_t));
  std::memcpy(member_.user(slot, Region::kExpertCounts), experts.data(),
              experts.size() * sizeof(std::int32_t));
  member_.publish_counts(slot, submission_.ticket, offsets, experts);
  route_->handle = index_ + 1;
  member_.save_route(slot);

  targets_.resize(s.num_ranks);
  for (std::uint32_t d = 0; d < s.num_ranks; ++d) {
    if (!group_.active(d)) continue;  // no row goes there
    std::byte* arena = group_.ranks[d].user.bytes();
    const auto at = [&](Region region) { return arena + group_.user_layout.at(slot, region); };
    targets_[d] = {at(Region::kRecvX),
                   reinterpret_cast<float*>(at(Region::kRecvScales)),
                   at(Region::kRecvTopkIdx),
                   reinterpret_cast<float*>(at(Region::kRecvTopkWeights)),
                   reinterpret_cast<std::int32_t*>(at(Region::kRecvSrc)),
                   base[d]};
  }
  kernels::DispatchArgs args;
  args.plan = &route_->plan;
  args.x = reinterpret_cast<const std::uint16_t*>(member_.user(slot, Region::kX));
  if ((submission_.flags & abi::kFlagWeights) != 0) {
    args.topk_weights = reinterpret_cast<const float*>(member_.user(slot, Region::kTopkWeights));
  }
  args.targets = targets_;
  args.source_rank = member_.rank;
  args.hidden = s.hidden;
  args.topk = s.topk;
  args.experts_per_rank = s.experts_per_rank();
  args.fp8 = s.payload == abi::Payload::kFp8Cast;
  args.index64 = s.index_type == abi::IndexType::kInt64;
  work_ = device.dispatch(args, group_.sms);
  enter(OpStage::kMoving);
  return StepResult::kProgress;
}

StepResult Operation::launch_combine(Device& device) {
  const abi::GroupShape& s = group_.shape;
  const std::uint32_t slot = submission_.slot;
  sources_.resize(s.num_ranks);
  for (std::uint32_t d = 0; d < s.num_ranks; ++d) {
    if (!group_.active(d)) continue;  // no row of it is used
    const std::byte* arena = group_.ranks[d].user.bytes();
    sources_[d] = {reinterpret_cast<const std::uint16_t*>(arena + group_.user_layout.at(slot, Region::kY)),
                   route_->base_rows[d]};
  }
  kernels::CombineArgs args;
  args.plan = &route_->plan;
  args.sources = sources_;
  if ((submission_.flags & abi::kFlagWeights) != 0) {
    args.topk_weights = reinterpret_cast<const float*>(member_.user(slot, Region::kTopkWeights));
  }
  args.out = reinterpret_cast<std::uint16_t*>(member_.user(slot, Region::kOut));
  args.hidden = s.hidden;
  args.topk = s.topk;
  args.experts_per_rank = s.experts_per_rank();
  work_ = device.combine(args, group_.sms);
  enter(OpStage::kMoving);
  return StepResult::kProgress;
}

StepResult Operation::move(Page& page) {
  switch (work_->advance()) {
    case WorkState::kAdvanced: return StepResult::kProgress;
    case WorkState::kWaiting: return StepResult::kIdle;
    case WorkState::kDone: break;
  }
  work_.reset();
  const abi::GroupShape& s = group_.shape;
  const std::uint64_t rows = route_->plan.entries.size();
  if (submission_.op == Op::kDispatch) {
    count_moved(page, member_, Op::kDispatch,
                rows * (std::uint64_t{s.row_bytes()} + std::uint64_t{s.scales_per_row()} * 4));
  } else {
    count_moved(page, member_, Op::kCombine, rows * s.hidden * 2);
  }
  for (std::uint32_t d = 0; d < s.num_ranks; ++d) {
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
    case OpStage::kMoving: return !work_->waiting();
    case OpStage::kBreaking:
    case OpStage::kNone: break;
  }
  return false;
}

void Operation::abandon() {
  work_.reset();  // waits for the chunks in hand
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
  if (status == StatusCode::kOk && route_ != nullptr) c.num_dropped_selections = route_->plan.num_dropped;
  c.seen_us = saturated_us(submission_.submit_ns, seen_ns_);
  c.launched_us = launched_ns_ == 0 ? 0 : saturated_us(submission_.submit_ns, launched_ns_);
  c.done_us = saturated_us(submission_.submit_ns, now_ns);
  return c;
}

}  // namespace epd
