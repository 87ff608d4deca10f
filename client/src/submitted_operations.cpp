// How callers wait for operations in flight, and look at them.
#include "submitted_operations.h"

#include "staging.h"
#include "ticket_status.h"

#include <algorithm>

namespace epd::client {
namespace {

// Every wait ends: a running engine answers. For an engine that does not, each call waits anew.
Deadline wait_end(const Operation& op, std::int32_t timeout_ms) {
  if (!for_ever(timeout_ms)) return Deadline::of_wait(timeout_ms);
  return Deadline::at(std::max(op.answer_by, SteadyClock::now() + kAnswerGrace));
}

// The status and text of an operation that has ended.
Status outcome(const Operation& op) {
  const auto code = static_cast<StatusCode>(op.result.status);
  if (code == StatusCode::kOk) return {};
  if (op.crowded) return too_many_rows(op.result.num_recv_rows, op.room);
  return {code, op.text.empty() ? describe(code, op.result.failed_rank) : op.text};
}

class TicketWaiter final : public Waiter {
 public:
  TicketWaiter(Completions& completions, const Group& group, epd_ticket_t ticket)
      : completions_(completions), group_(group), ticket_(ticket) {}

  // Null when the ticket has been retired.
  Operation* operation() {
    Operation* const op = completions_.find(ticket_);
    return op != nullptr && op->group == &group_ ? op : nullptr;
  }
  bool ready() override {
    ended = operation();
    return ended == nullptr || ended->done;
  }

  Operation* ended = nullptr;  // set when ready

 private:
  Completions& completions_;
  const Group& group_;
  const epd_ticket_t ticket_;
};

// Waits for something that the board says of an operation before it ends.
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

}  // namespace

SubmittedOperations::SubmittedOperations(abi::SegmentA& a, abi::SegmentB& b, const UniqueFd& engine_bell,
                                         const abi::Welcome& welcome, Waits& waits, Connection& connection,
                                         Hooks& hooks)
    : welcome_(welcome),
      waits_(waits),
      connection_(connection),
      hooks_(hooks),
      ring_(a, b, engine_bell),
      completions_(a, b, hooks) {}

bool SubmittedOperations::take_news_locked() {
  const bool any = completions_.take();
  connection_.note_end_locked();
  if (any) {
    ring_.wake_engine(abi::kAsleepForRoom);
    waits_.notify_locked();
  }
  return any;
}

Status SubmittedOperations::wait(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms,
                                 epd_result_t* result) {
  TicketWaiter waiter(completions_, group, ticket);
  Lock lock = waits_.lock();
  const Operation* op = waiter.operation();
  if (op == nullptr || !op->waiting_hook.empty()) return unknown_ticket(ticket);
  if (!waits_.wait(lock, waiter, wait_end(*op, timeout_ms))) {
    return not_yet(ticket, timeout_ms, "has not completed", group.shape.span);
  }
  op = waiter.ended;
  if (op == nullptr) return unknown_ticket(ticket);
  if (result != nullptr) *result = op->result;
  Status end = outcome(*op);
  if (op->has_outputs) {
    const std::uint32_t slot = op->slot;
    lock.unlock();
    finish_outputs(group, slot, ticket);
    lock.lock();
  }
  completions_.retire(ticket);
  return end;
}

bool SubmittedOperations::overdue_locked(Group& group) {
  return completions_.overdue(group);
}

bool SubmittedOperations::pending(Group& group, epd_ticket_t ticket) {
  TicketWaiter waiter(completions_, group, ticket);
  Lock lock = waits_.lock();
  return !waits_.wait(lock, waiter, Deadline::in_ms(0));
}

Status SubmittedOperations::counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms,
                                   epd_counts_t& counts) {
  TicketWaiter by_ticket(completions_, group, ticket);
  Lock lock = waits_.lock();
  const Operation* op = by_ticket.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (op->op != abi::Op::kDispatch) return no_dispatch(ticket, op->op);
  const std::uint32_t slot = op->slot;
  BoardWaiter waiter(by_ticket, group.board, slot, ticket, &BoardView::has_counts);
  const bool ready = waits_.wait(lock, waiter, wait_end(*op, timeout_ms));
  op = by_ticket.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (op->done && op->result.status != EPD_OK && !op->crowded) return outcome(*op);
  if (!ready) return not_yet(ticket, timeout_ms, "has no counts", group.shape.span);
  if (!group.board.has_counts(slot, ticket)) return counts_replaced(ticket, slot);
  counts.num_recv_rows = group.board.num_recv_rows(slot);
  counts.rank_offsets = group.board.rank_offsets(slot);
  counts.expert_counts = group.board.expert_counts(slot);
  counts.expert_offsets = group.board.expert_offsets(slot);
  return {};
}

Status SubmittedOperations::wait_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms) {
  TicketWaiter by_ticket(completions_, group, ticket);
  Lock lock = waits_.lock();
  const Operation* op = by_ticket.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (!op->deferred) return not_deferred(ticket);
  BoardWaiter waiter(by_ticket, group.board, op->slot, ticket, &BoardView::has_sent);
  const bool ready = waits_.wait(lock, waiter, wait_end(*op, timeout_ms));
  op = by_ticket.operation();
  if (op == nullptr) return unknown_ticket(ticket);
  if (op->done && !op->crowded) return outcome(*op);
  return ready ? Status()
               : not_yet(ticket, timeout_ms, "has not finished reading its inputs", group.shape.span);
}

Status SubmittedOperations::wait_on_stream(Group& group, epd_ticket_t ticket, void* stream) {
  if (stream == EPD_NO_STREAM) return invalid_argument("stream is EPD_NO_STREAM; allowed: a stream");
  const Lock lock = waits_.lock();
  const Operation* const op = completions_.find(ticket);
  if (op == nullptr) return unknown_ticket(ticket);
  return op->group == &group ? not_in_stream(ticket) : of_another_group(ticket);
}

Status SubmittedOperations::on_complete(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user) {
  const Lock lock = waits_.lock();
  const Operation* const op = completions_.find(ticket);
  if (op == nullptr || op->group != &group || !op->waiting_hook.empty()) {
    return not_found("ticket " + std::to_string(ticket) +
                     " is not in flight in this group: never issued, retired already, or it has a hook");
  }
  Status started = hooks_.start_locked();
  if (!started.ok()) return started;
  std::list<HookCall> call(1);
  call.front() = {&group, hook, user, {}, op->has_outputs ? ticket : 0, op->slot};
  completions_.add_hook(ticket, call);
  return {};
}

// Its outputs are wanted no more, even if the slot is used again before the hook has run.
Status SubmittedOperations::drop(Group& group, epd_ticket_t ticket) {
  bool has_outputs = false;
  std::uint32_t slot = 0;
  {
    const Lock lock = waits_.lock();
    const Operation* const op = completions_.find(ticket);
    if (op != nullptr && op->group == &group && op->waiting_hook.empty()) {
      has_outputs = op->has_outputs;
      slot = op->slot;
    }
  }
  if (has_outputs) {
    const std::lock_guard<std::mutex> order(group.submit_mutex);
    if (group.outputs[slot].ticket == ticket) group.outputs[slot].ticket = 0;
  }
  return on_complete(
      group, ticket, [](const epd_result_t*, void*) {}, nullptr);
}

void SubmittedOperations::copy_outputs(Group& group, std::uint32_t slot) {
  Outputs& outputs = group.outputs[slot];
  if (outputs.ticket == 0) return;
  {
    const Lock lock = waits_.lock();
    if (group.ended_well[slot] != outputs.ticket) return;
  }
  copy_out(outputs.copies);
  outputs.ticket = 0;
}

void SubmittedOperations::finish_outputs(Group& group, std::uint32_t slot, epd_ticket_t ticket) {
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  if (group.outputs[slot].ticket == ticket) copy_outputs(group, slot);
}

Status SubmittedOperations::release_handle(Group& group, epd_handle_t handle) {
  Lock lock = waits_.lock();
  take_news_locked();
  if (!connection_.ended().ok()) return connection_.ended();
  Status status = group.release_handle(handle);
  return status.code() == StatusCode::kWouldBlock ? connection_.blocked(lock, status.message()) : status;
}

Status SubmittedOperations::check(Group& group, epd_progress_t& progress) {
  connection_.probe();
  const Lock lock = waits_.lock();
  take_news_locked();
  progress.next_op = group.board.next_index();
  return connection_.ended().ok() ? group.usable_in(group.epoch) : connection_.ended();
}

}  // namespace epd::client
