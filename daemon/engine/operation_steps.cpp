// Operation, second part: how it is launched, and how it follows what the device reports.

#include "announcement.h"
#include "device_operation.h"
#include "operation.h"

#include <algorithm>
#include <vector>

namespace epd::engine {

using abi::OpStage;
using kernels::cuda::OpError;
using kernels::cuda::OpResult;

kernels::cuda::Peer Operation::peer(std::uint32_t rank) const {
  kernels::cuda::Peer peer;
  kernels::cuda::compose_peer(peer, group_.exchange_layout, group_.ranks[rank].view, call_);
  return peer;
}

device::OperationPeers::RoutedRows Operation::routed_rows(std::uint32_t rank, std::uint64_t routing) const {
  const GroupRankMemory& memory = group_.ranks[rank];
  const std::uint32_t route =
      peer(member_.rank).announcement[rank].route;  // each rank chooses its records itself
  if (route >= group_.shape.num_routes()) return {};
  const std::byte* const half =
      device::find_routing(memory.exchange->bytes(), group_.exchange_layout, route, routing);
  if (half == nullptr) return {};
  return {reinterpret_cast<const std::int32_t*>(half + group_.exchange_layout.placement),
          memory.view.y.at<const std::uint16_t>(call_.slot),
          memory.view.y_weights.at<const float>(call_.slot)};
}

StepResult Operation::step(std::uint64_t now_ns) {
  if (stage() == OpStage::kBreaking) return StepResult::kIdle;
  if (in_flight_ != nullptr) return look(now_ns);
  if (may_launch()) return plan(now_ns);
  if (!std::exchange(held_up_, true)) count_stall(member_, abi::Stall::kDepth);
  return StepResult::kIdle;
}

bool Operation::runnable() const {
  if (stage() == OpStage::kBreaking) return false;
  if (in_flight_ == nullptr) return may_launch();
  return in_flight_->can_advance() || in_flight_->ended() || counts_news() || sent_news();
}

bool Operation::may_be_done() const {
  return in_flight_ != nullptr && (stage() == OpStage::kWaitArrived || in_flight_->ended());
}

// ---- planning

// Launches follow the order of submission. A later operation must not overwrite a routing record that is
// still read. A block serves operations that are `depth` apart: its former user must be done on every rank.
bool Operation::may_launch() const {
  for (const Operation* earlier : member_.operations) {
    if (earlier == this) break;
    if (earlier->stage() == OpStage::kPlanning) return false;
  }
  if (group_.far != nullptr && !group_.far->has_begun()) return false;
  return member_.next_index() + group_.shape.depth > index_ &&
         (!routes() || member_.heads->may_begin(submission_.route));
}

StepResult Operation::plan(std::uint64_t now_ns) {
  if (!find_route()) return StepResult::kFailed;
  launch(now_ns);
  return StepResult::kProgress;
}

// False: failure() has the reason.
bool Operation::find_route() {
  std::byte* const exchange = member_.exchange();
  const std::string routing = "the routing of dispatch " + std::to_string(submission_.handle);
  if (routes()) {
    // The device writes the head in the arena. The engine's copy is found at once.
    const RouteHeads::Head head{number_ + 1, group_.epoch, submission_.num_tokens, 0, 0, 0};
    route_ = member_.heads->begin(submission_.route, head, exchange);
  } else if (!is_earlier()) {
    route_ = member_.heads->find(submission_.route, submission_.handle, exchange);
    if (route_.half == nullptr) {
      fail(stale_handle());
      return false;
    }
    if (is_dispatch() && route_.head.epoch < group_.changed_epoch) {
      fail(changed_group_failure(subject(), routing, route_.head.epoch));
      return false;
    }
  } else if (is_dispatch()) {
    fail(changed_group_failure(subject(), routing, 0));
    return false;
  } else {  // the rank has no rows of a dispatch from before it joined
    route_.half = exchange + group_.exchange_layout.routing_of(submission_.route);
  }
  return true;
}

// The tag of the dispatch that made the routing, with the record's epoch (0 if that is not known).
std::uint64_t Operation::routing_tag() const {
  if (routes()) return 0;
  if (submission_.handle == abi::kEarlierDispatch) return abi::kUnknownRouting;
  const std::uint64_t made_by = route_.head.handle != 0 ? route_.head.handle : submission_.handle + 1;
  return abi::op_tag(route_.head.epoch, made_by - 1);
}

void Operation::launch(std::uint64_t now_ns) {
  call_ = taken_call(group_, submission_,
                     {tag_, number_, routing_tag(), route_.head.num_tokens, route_.half_index});
  kernels::cuda::Operation op = kernels::cuda::compose(member_.view, call_);
  // The engine's own deadline comes first, unless the loop stands still.
  op.timeout_ns = deadline_ns_ - seen_ns_;
  device::LaunchRequest request;
  request.kind = is_dispatch() ? kernels::cuda::Kind::kDispatch : kernels::cuda::Kind::kCombine;
  request.op = &op;
  request.peers = this;
  request.record = submission_.route;
  request.waits = member_.waits();
  request.sms = group_.share_sms(submission_.sms);
  in_flight_ = member_.lane->launch(request);
  begun_ns_ = now_ns;
  enter(in_flight_->stage());
}

// ---- in flight

StepResult Operation::look(std::uint64_t now_ns) {
  bool progress = in_flight_->advance();
  if (const OpStage now_at = in_flight_->stage(); now_at != stage()) enter(now_at);
  if (counts_news()) {
    publish_counts();
    progress = true;
  }
  if (sent_news()) {
    publish_sent();
    progress = true;
  }
  if (in_flight_->ended()) return conclude(now_ns);
  show_awaited();
  show_far_wait(!progress, now_ns);
  return progress ? StepResult::kProgress : StepResult::kIdle;
}

bool Operation::counts_news() const {
  return is_dispatch() && !counted_ && in_flight_->counted();
}

bool Operation::sent_news() const {
  return is_dispatch() && has(abi::kFlagDefer) && !sent_ && in_flight_->sent();
}

void Operation::publish_sent() {
  sent_ = true;
  member_.publish_sent(submission_.slot, submission_.ticket);
}

void Operation::publish_counts() {
  counted_ = true;
  const kernels::Placement& counts = in_flight_->counts();
  num_recv_rows_ = counts.num_recv_rows;
  member_.publish_counts(submission_.slot, submission_.ticket, counts);
}

StepResult Operation::conclude(std::uint64_t now_ns) {
  concluded_ = true;
  const OpResult& result = in_flight_->result();  // the rest of it may still leave the device
  if (result.error != OpError::kNone) return fail(device_failed(now_ns));
  if (result.ran_ns != 0) begun_ns_ = std::max(begun_ns_, now_ns - std::min(now_ns, result.ran_ns));
  if (is_dispatch() && !counted_) publish_counts();  // both came between two looks
  keep_route(result);
  if (is_dispatch() && has(abi::kFlagDefer) && !sent_) publish_sent();
  return StepResult::kDone;
}

void Operation::keep_route(const OpResult& result) {
  if (routes()) {
    route_kept_ = true;
    route_.head = {number_ + 1,          group_.epoch,       submission_.num_tokens,
                   result.num_recv_rows, result.num_dropped, 0};
    member_.heads->update(submission_.route, route_.head);
  } else if (!is_earlier()) {  // its dispatch has ended meanwhile
    const RouteHeads::Place now =
        member_.heads->find(submission_.route, submission_.handle, member_.exchange());
    if (now.half == route_.half) route_.head = now.head;
  }
  if (is_dispatch()) num_recv_rows_ = route_.head.num_recv_rows;
  num_dropped_ = route_.head.num_dropped + count_lost_selections();
  count_rows(page_, member_, submission_.op, submission_.flags, route_.head.num_recv_rows);
}

// Selections whose rows went to ranks that have been lost since.
std::uint32_t Operation::count_lost_selections() const {
  if (route_.head.epoch >= group_.changed_epoch || route_.head.num_tokens == 0) return 0;
  std::vector<std::uint8_t> lost(group_.shape.num_ranks);
  for (std::uint32_t rank = 0; rank < lost.size(); ++rank)
    lost[rank] = group_.serves(rank, route_.head.epoch) ? 0 : 1;
  return in_flight_->count_selections(lost);
}

// ---- ends

StepResult Operation::expire(std::uint64_t now_ns) {
  if (in_flight_ == nullptr)
    return fail(
        {StatusCode::kDeadlineExceeded, -1, expired_text(now_ns) + ": an earlier operation had not ended"});
  if (!std::exchange(expired_, true)) {
    waited_for_ = in_flight_->waits_for();
    in_flight_->abort();  // its result will name the rank that it waited for
  }
  return in_flight_->ended() ? conclude(now_ns) : StepResult::kIdle;
}

Failure Operation::stale_handle() const {
  return {StatusCode::kNotFound, static_cast<std::int32_t>(member_.rank),
          "operation " + std::to_string(index_) + ": " + op_name(submission_.op) + " on slot " +
              std::to_string(submission_.slot) + " names the routing of dispatch " +
              std::to_string(submission_.handle) + ", which record " + std::to_string(submission_.route) +
              " of rank " + std::to_string(member_.rank) +
              " does not hold; allowed: the last completed dispatch of that record"};
}

Failure Operation::device_failed(std::uint64_t now_ns) const {
  const OpResult& result = in_flight_->result();
  if (result.error == OpError::kNoRouting) return stale_handle();
  const bool late = result.error == OpError::kAborted || result.error == OpError::kDeadline;
  const std::string far_text = waited_for_.empty() ? "" : "; it waited for " + waited_for_;
  if (!late || in_flight_->awaited(0) == device::OperationInFlight::kNobody) {
    Failure failure = device_failure(subject(), launcher_, result, expired_text(now_ns), now_ns);
    failure.text += far_text;
    return failure;
  }
  const std::uint32_t rank = whom_to_blame(now_ns);
  const std::string why =
      awaited_text(group_, rank, group_.stands_still_ms(rank, now_ns, seen_ns_),
                   in_flight_->stage() == OpStage::kWaitReady ? "has not submitted it"
                                                              : "has not finished moving its rows");
  return {StatusCode::kDeadlineExceeded, static_cast<std::int32_t>(rank),
          expired_text(now_ns) + ": " + why + far_text};
}

// Among the missing ranks, prefers one whose engine stands still to the first one: a rank may have submitted
// what its engine has not taken.
std::uint32_t Operation::whom_to_blame(std::uint64_t now_ns) const {
  const std::uint32_t first = in_flight_->awaited(0);
  for (std::uint32_t rank = first; rank != device::OperationInFlight::kNobody;
       rank = in_flight_->awaited(rank + 1)) {
    if (group_.stands_still_ms(rank, now_ns, seen_ns_) != 0) return rank;
  }
  return first;
}

void Operation::abandon() {
  if (in_flight_ != nullptr && !in_flight_->ended()) in_flight_->abort();
  enter(OpStage::kBreaking);
}

// The break and the last arrival may have crossed. What the peers saw succeed need not fail here.
bool Operation::completed_anyway() {
  if (in_flight_ == nullptr || concluded_) return false;
  concluded_ = true;
  OpResult result = in_flight_->result();
  // The sums of other nodes come after `arrived`.
  const bool sums_far = group_.far != nullptr && !is_dispatch();
  if (result.error == OpError::kAborted && !sums_far && all_arrived(member_, launcher_, index_, tag_)) {
    if (is_dispatch() && !counted_) publish_counts();
    result.error = OpError::kNone;
    result.num_recv_rows = num_recv_rows_;
    if (routes()) {
      const RouteHeads::Head head{number_ + 1,    group_.epoch,       submission_.num_tokens,
                                  num_recv_rows_, result.num_dropped, 0};
      launcher_.write(route_.half, &head, sizeof(head));
    }
  }
  if (result.error != OpError::kNone) return false;
  if (is_dispatch() && !counted_) publish_counts();
  keep_route(result);
  return true;
}

}  // namespace epd::engine
