#include "operations.h"

#include "break_request.h"
#include "failures.h"
#include "round_clock.h"
#include "session_port.h"

#include <algorithm>
#include <vector>

namespace epd::engine {
namespace {

constexpr std::uint64_t kTurnNs = 50'000;        // for the operations of one session
constexpr std::uint32_t kTurnsPerLowChunk = 16;  // see take_turn

std::vector<Operation*> operations_of(const Group& group) {
  std::vector<Operation*> all;
  for (const auto& member : group.members)
    all.insert(all.end(), member->operations.begin(), member->operations.end());
  return all;
}

}  // namespace

void Operations::start(Member& member, const abi::Submission& submission, std::uint32_t timeout_ms) {
  const std::uint64_t seen_ns = clock_.round_ns();
  auto operation = std::make_unique<Operation>(
      member, submission, seen_ns, seen_ns + std::uint64_t{timeout_ms} * 1'000'000, launcher_, page_);
  member.inflight.insert(operation->index());
  member.slot_use[submission.slot] = {true, submission.ticket};
  ++member.next_number;
  renew_numbers(member, link_);
  count_taken(member, submission.op);
  show(*operation);
  // While the group agrees on a break, or on what a lost rank leaves behind, all ranks are stopped. The
  // operation then waits with the others for its verdict.
  if (member.group.life.holds_back() || member.stopped()) {
    count_stall(member, abi::Stall::kGroup);
    operation->abandon();
  }
  schedule_.add(member.session->id(), std::move(operation));
  idle_turns_ = 0;
}

void Operations::show(Operation& operation) {
  abi::OpView* const view = page_.claim(operation.submission());
  if (view == nullptr) return;
  const Member& member = operation.member();
  view->session_id = member.session->id();
  view->group_id = member.group.id;
  view->rank = member.rank;
  view->op_index = operation.index();
  operation.show(view);
}

// Serves the sessions by turns, until each has had its turn or the round has lasted long enough.
bool Operations::step() {
  if (schedule_.empty()) return false;
  bool progress = false;
  const std::int32_t first = schedule_.moving_priority();
  std::uint64_t now = clock_.now_ns();
  const std::uint64_t end = now + kShareNs;
  for (std::size_t left = schedule_.num_sessions(); left > 0 && now < end && !schedule_.empty(); --left) {
    const bool moved = take_turn(schedule_.next_session(), first, now + kTurnNs);
    idle_turns_ = moved ? 0 : idle_turns_ + 1;
    progress |= moved;
    now = clock_.now_ns();
  }
  return progress || idle_turns_ < schedule_.num_sessions();
}

// Steps the operations of one session, each until it waits. While rows of a higher priority can move,
// operations of a lower one pause. Now and then they get a chunk, so that they end.
bool Operations::take_turn(Schedule::Queue& queue, std::int32_t first, std::uint64_t until_ns) {
  const std::int32_t moves_from = ++queue.turns % kTurnsPerLowChunk == 0 ? kNoPriority : first;
  bool progress = false;
  bool over = false;
  for (std::size_t left = queue.size(); left > 0 && !over; --left) {
    Operation* operation = queue.next();
    if (operation == nullptr) break;
    StepResult result;
    do {
      result = step(*operation, moves_from);
      progress |= result == StepResult::kProgress;
      over = result != StepResult::kIdle && clock_.now_ns() >= until_ns;
    } while (result == StepResult::kProgress && !over);
    if (operation->can_move()) queue.note_moving(operation->member().group.priority);
    progress |= end_if_done(*operation, result);
  }
  return progress;
}

bool Operations::end_if_done(Operation& operation, StepResult result) {
  if (result == StepResult::kDone) {
    finish(operation, StatusCode::kOk, {});
  } else if (operation.verdict() && operation.settled()) {
    finish(operation, operation.verdict()->cause, *operation.verdict());
  } else {
    return false;
  }
  return true;
}

StepResult Operations::step(Operation& operation, std::int32_t first) {
  Group& group = operation.member().group;
  if (operation.stage() == abi::OpStage::kBreaking) {
    const bool counts = operation.settled() && group.life.counts_ends() && operation.completed_anyway();
    return counts ? StepResult::kDone : StepResult::kIdle;
  }
  const std::uint64_t now_ns = clock_.round_ns();
  const bool stands_back = group.priority < first && operation.can_move();
  StepResult result = stands_back ? StepResult::kIdle : operation.step(now_ns);
  if (result == StepResult::kIdle && now_ns >= operation.deadline_ns()) result = operation.expire(now_ns);
  if (result != StepResult::kFailed) return result;
  if (group.life.is_lost()) {
    operation.set_verdict(operation.failure());  // the group will not break (again) because of it
  } else {
    request_break(group, operation.failure(), link_);
  }
  return StepResult::kIdle;
}

// An operation that the peers saw succeed must not fail because of a later break.
void Operations::finish_arrived(const Group& group) {
  for (Operation* operation : operations_of(group)) {
    if (operation->may_be_done() && operation->step(clock_.round_ns()) == StepResult::kDone)
      finish(*operation, StatusCode::kOk, {});
  }
}

void Operations::fail(const Group& group, std::uint64_t from, const abi::Break& cause) {
  for (const auto& member : group.members) fail(*member, from, cause);
}

void Operations::fail(const Member& member, std::uint64_t from, const abi::Break& cause) {
  const std::vector<Operation*> operations = member.operations;  // finish() takes them from there
  for (Operation* operation : operations) {
    if (operation->index() < from && operation->stage() != abi::OpStage::kBreaking) continue;
    if (operation->settled()) {
      finish(*operation, cause.cause, cause);
    } else {
      operation->set_verdict(cause);
    }
  }
}

void Operations::end(const Member& member, const abi::Break& cause) {
  while (!member.operations.empty()) finish(*member.operations.front(), cause.cause, cause);
}

void Operations::abandon_all() {
  schedule_.for_each([](Operation& operation) { operation.abandon(); });
}

// Answers the operation and destroys it.
void Operations::finish(const Operation& operation, StatusCode status, const abi::Break& cause) {
  Member& member = operation.member();
  const bool ok = status == StatusCode::kOk;
  const std::uint32_t slot = operation.submission().slot;
  member.inflight.erase(operation.index());
  if (!ok) member.failed_from = std::min(member.failed_from, operation.index());
  member.slot_use[slot].in_flight = false;
  member.publish_next_index();
  count(ok ? page_->ops_completed : page_->ops_failed);
  const abi::Completion completion =
      operation.completion(status, ok ? -1 : cause.failed_rank, clock_.now_ns());
  count_ended(member, operation.submission().op, completion);
  if (!ok) {
    std::string text(cause.text, abi::text_length(cause.text));
    member.publish_message(slot, operation.submission().ticket, text);
    log_failure(member, operation.submission().op, operation.index(),
                {status, cause.failed_rank, std::move(text)});
  }
  member.session->complete(completion);
  schedule_.remove(operation);
}

bool Operations::runnable() const {
  return schedule_.find([](const Operation& operation) { return operation.runnable(); }) != nullptr;
}

std::uint64_t Operations::next_deadline_ns() const {
  std::uint64_t next = kNever;
  schedule_.for_each([&](const Operation& operation) {
    if (operation.stage() != abi::OpStage::kBreaking) next = std::min(next, operation.deadline_ns());
  });
  return next;
}

}  // namespace epd::engine
