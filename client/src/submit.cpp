// Session: from a checked call to a slot in the ring.
#include "session.h"

#include <ctime>

namespace epd::client {
namespace {

std::uint64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

// The engine has the last word; this finds what can be seen from here.
Status check_handle(const Group& group, const SubmitRequest& request) {
  const std::uint64_t known = group.slots[request.slot].handle;
  // Of a dispatch before this rank's time, in which it had no tokens.
  if (request.handle != 0 && request.handle <= group.first_index) return {};
  if (request.handle != 0 && request.handle <= group.next_index && (known == 0 || known == request.handle)) {
    return {};
  }
  std::string allowed = "the handle of a dispatch on the slot";
  if (known == kNoDispatch) allowed = "none, the slot has had no dispatch";
  if (known != 0 && known != kNoDispatch) allowed = std::to_string(known) + ", of the slot's last dispatch";
  return not_found("handle " + std::to_string(request.handle) + " is stale on slot " +
                   std::to_string(request.slot) + "; allowed: " + allowed);
}

Status check_request(const Group& group, const SubmitRequest& request) {
  if (request.slot >= group.shape.depth) {
    return bad_value("slot", request.slot, "0 .. " + std::to_string(group.shape.depth - 1));
  }
  if (request.num_tokens > group.shape.max_tokens) {
    return bad_value("num_tokens", request.num_tokens, "0 .. " + std::to_string(group.shape.max_tokens));
  }
  return {};
}

}  // namespace

// Nobody may be waiting who would notice that the daemon is gone, so look.
Status Session::blocked(Lock& lock, std::string why) {
  lock.unlock();
  probe();
  lock.lock();
  return ended_.ok() ? would_block(std::move(why)) : ended_;
}

Status Session::submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                       epd_handle_t* handle) {
  Status status = check_request(group, request);
  if (!status.ok()) return status;
  Lock lock(mutex_);
  GroupSlot& slot = group.slots[request.slot];
  if (slot.ticket != 0) drain_locked();
  note_ended_locked();
  if (!ended_.ok()) return ended_;
  if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
  status = group.board.usable_in(group.epoch);
  if (!status.ok()) return status;
  if (slot.ticket != 0) {
    return blocked(lock, "slot " + std::to_string(request.slot) + " has ticket " +
                             std::to_string(slot.ticket) + " in flight");
  }
  if (request.op == abi::Op::kCombine) status = check_handle(group, request);
  if (!status.ok()) return status;

  abi::Submission submission{};
  submission.ticket = last_ticket_ + 1;
  submission.epoch = group.epoch;
  submission.handle = request.op == abi::Op::kCombine ? request.handle - 1 : 0;
  submission.submit_ns = monotonic_ns();
  submission.op = request.op;
  submission.member = group.member;
  submission.slot = request.slot;
  submission.num_tokens = request.num_tokens;
  submission.flags = request.flags;
  submission.timeout_ms = request.timeout_ms;
  // Before the push: the completion may be there as soon as it is published.
  Operation& op = operations_[submission.ticket];
  op.group = &group;
  op.op = request.op;
  op.slot = request.slot;
  const std::uint32_t timeout_ms = request.timeout_ms != 0 ? request.timeout_ms : group.default_timeout_ms;
  op.answer_by = SteadyClock::now() + std::chrono::milliseconds(timeout_ms) + kAnswerGrace;
  const abi::PushResult pushed =
      abi::ring_push(a().submissions, submission_tail_, b().submission_head, submission);
  if (pushed != abi::PushResult::kPushed) {
    operations_.erase(submission.ticket);
    if (pushed == abi::PushResult::kCorrupt) {
      return internal_error("the engine's submission index " +
                            std::to_string(b().submission_head.value.load(std::memory_order_relaxed)) +
                            " does not fit the client's " + std::to_string(submission_tail_));
    }
    return blocked(lock, "the session's ring is full: " + std::to_string(abi::kSubmissionSlots) +
                             " submissions wait for the engine");
  }
  ++submission_tail_;
  last_ticket_ = ticket = submission.ticket;
  slot.ticket = ticket;
  if (request.op != abi::Op::kNoop) ++group.next_index;
  if (request.op == abi::Op::kDispatch) {
    slot.handle = group.next_index;
    if (handle != nullptr) *handle = slot.handle;
  }
  lock.unlock();

  ring_engine(abi::kAsleep);
  return {};
}

}  // namespace epd::client
