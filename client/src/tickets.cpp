// Session: what callers may ask about operations in flight, and how they go on after a break.
#include "session.h"
#include "ticket_status.h"

#include <algorithm>
#include <thread>

namespace epd::client {
namespace {

constexpr std::chrono::milliseconds kAskAgain{1};  // an engine that is coming back

// No wait is for ever: an engine that runs answers. One that does not is waited for anew by each call.
Deadline wait_end(const Operation& op, std::int32_t timeout_ms) {
  if (!for_ever(timeout_ms)) return Deadline::of_wait(timeout_ms);
  return Deadline::at(std::max(op.answer_by, SteadyClock::now() + kAnswerGrace));
}

// Of an operation that has ended.
Status outcome(const Operation& op) {
  const auto code = static_cast<StatusCode>(op.result.status);
  if (code == StatusCode::kOk) return {};
  return {code, op.text.empty() ? describe(code, op.result.failed_rank) : op.text};
}

}  // namespace

class TicketWaiter final : public Waiter {
 public:
  TicketWaiter(Session& session, const Group& group, epd_ticket_t ticket)
      : session_(session), group_(group), ticket_(ticket) {}

  // Null once somebody has retired the ticket.
  Operation* operation() {
    const auto found = session_.operations_.find(ticket_);
    return found != session_.operations_.end() && found->second.group == &group_ ? &found->second : nullptr;
  }
  bool ready() override {
    const Operation* op = operation();
    return op == nullptr || op->done;
  }

 private:
  Session& session_;
  const Group& group_;
  const epd_ticket_t ticket_;
};

// For something that the board says of an operation before it ends.
class BoardWaiter final : public Waiter {
 public:
  using Look = bool (BoardView::*)(std::uint32_t slot, std::uint64_t ticket) const;
  BoardWaiter(TicketWaiter& ticket, const BoardView& board, std::uint32_t slot, epd_ticket_t number,
              Look look)
      : ticket_(ticket), board_(board), slot_(slot), number_(number), look_(look) {}
  bool ready() override { return ticket_.ready() || glance(); }
  bool glance() const override { return (board_.*look_)(slot_, number_); }

 private:
  TicketWaiter& ticket_;
  const BoardView& board_;
  const std::uint32_t slot_;
  const epd_ticket_t number_;
  const Look look_;
};

class ResumeWaiter final : public Waiter {
 public:
  ResumeWaiter(const Session& session, const Group& group) : session_(session), group_(group) {
    slice = std::chrono::milliseconds(10);
  }
  bool ready() override {
    if (!session_.ended_.ok() || group_.left) return true;
    if (!group_.board.snapshot(board)) return false;
    return board.state == abi::GroupState::kActive || board.state == abi::GroupState::kLost;
  }

  BoardSnapshot board;  // of the last look

 private:
  const Session& session_;
  const Group& group_;
};

Status Session::wait_ticket(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms,
                            epd_result_t* result) {
  Status status = check_wait(timeout_ms);
  if (!status.ok()) return status;
  if (CallTicket::is(ticket)) return wait_call(group, ticket, timeout_ms, result);
  TicketWaiter waiter(*this, group, ticket);
  Lock lock(mutex_);
  const Operation* op = waiter.operation();
  if (op == nullptr || !op->waiting_hook.empty()) return unknown_ticket(ticket);
  if (!wait(lock, waiter, wait_end(*op, timeout_ms))) {
    return not_yet(ticket, timeout_ms, "has not completed");
  }
  op = waiter.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (result != nullptr) *result = op->result;
  Status end = outcome(*op);
  operations_.erase(ticket);
  return end;
}

bool Session::pending(Group& group, epd_ticket_t ticket) {
  if (CallTicket::is(ticket)) return call_pending(group, ticket);
  TicketWaiter waiter(*this, group, ticket);
  Lock lock(mutex_);
  return !wait(lock, waiter, Deadline::in_ms(0));
}

Status Session::counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_counts_t& counts) {
  Status status = check_wait(timeout_ms);
  if (!status.ok()) return status;
  if (CallTicket::is(ticket)) return call_counts(group, ticket, timeout_ms, counts);
  TicketWaiter by_ticket(*this, group, ticket);
  Lock lock(mutex_);
  const Operation* op = by_ticket.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (op->op != abi::Op::kDispatch) return no_dispatch(ticket, op->op);
  const std::uint32_t slot = op->slot;
  BoardWaiter waiter(by_ticket, group.board, slot, ticket, &BoardView::has_counts);
  const bool ready = wait(lock, waiter, wait_end(*op, timeout_ms));
  op = by_ticket.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (op->done && op->result.status != EPD_OK) return outcome(*op);
  if (!ready) return not_yet(ticket, timeout_ms, "has no counts");
  if (!group.board.has_counts(slot, ticket)) return counts_replaced(ticket, slot);
  counts.num_recv_rows = group.board.num_recv_rows(slot);
  counts.rank_offsets = group.board.rank_offsets(slot);
  counts.expert_counts = group.board.expert_counts(slot);
  counts.expert_offsets = group.board.expert_offsets(slot);
  return {};
}

Status Session::wait_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms) {
  Status status = check_wait(timeout_ms);
  if (!status.ok()) return status;
  if (CallTicket::is(ticket)) return call_sent(group, ticket, timeout_ms);
  TicketWaiter by_ticket(*this, group, ticket);
  Lock lock(mutex_);
  const Operation* op = by_ticket.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (!op->deferred) return not_deferred(ticket);
  BoardWaiter waiter(by_ticket, group.board, op->slot, ticket, &BoardView::has_sent);
  const bool ready = wait(lock, waiter, wait_end(*op, timeout_ms));
  op = by_ticket.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (op->done) return outcome(*op);
  return ready ? Status() : not_yet(ticket, timeout_ms, "still reads its inputs");
}

Status Session::resume(Group& group, std::int32_t timeout_ms, epd_resume_info_t& info) {
  Status status = check_wait(timeout_ms);
  if (!status.ok()) return status;
  const Deadline deadline = Deadline::of_wait(timeout_ms);
  for (;;) {
    status = take_epoch(group, timeout_ms, deadline, info);
    if (!status.ok() || !group.calls.by_calls()) return status;
    status = renew_calls(group);
    if (status.ok()) return status;
    // It may have broken again meanwhile, which is no other case than that it breaks a little later. An
    // engine that was restarted says so before the board does.
    const bool restarted = status.code() == StatusCode::kEngineRestarted;
    {
      const Lock lock(mutex_);
      const bool broken = restarted || !group.board.usable_in(group.epoch).ok();
      if (!ended_.ok() || !broken || deadline.passed()) return status;
    }
    if (restarted) std::this_thread::sleep_for(kAskAgain);
  }
}

Status Session::take_epoch(Group& group, std::int32_t timeout_ms, Deadline deadline,
                           epd_resume_info_t& info) {
  ResumeWaiter waiter(*this, group);
  Lock lock(mutex_);
  const bool ready = wait(lock, waiter, deadline);
  if (!ended_.ok()) return ended_;
  if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
  if (!ready) {
    const std::string text = "the group has not agreed on a new epoch";
    if (timeout_ms == EPD_NO_WAIT) return would_block(text + " yet");
    return {StatusCode::kDeadlineExceeded, text + " within " + std::to_string(timeout_ms) + " ms"};
  }
  const BoardSnapshot& board = waiter.board;
  if (board.state == abi::GroupState::kLost) return break_status(board);
  if (board.epoch > group.epoch) {
    group.epoch = board.epoch;
    group.next_index = board.resume_index;
    // Handles of calls name records, whatever becomes of what these hold.
    if (!group.calls.by_calls()) group.forget_routes_from(board.resume_index);
  }
  info.epoch = group.epoch;
  info.resume_op = group.next_index;
  info.num_active_ranks = board.num_active_ranks;
  return {};
}

}  // namespace epd::client
