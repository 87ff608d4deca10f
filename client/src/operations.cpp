// How calls end, and how callers wait for them.
#include "operations.h"

#include "staging.h"
#include "ticket_status.h"

#include <sched.h>
#include <algorithm>
#include <thread>

namespace epd::client {
namespace {

// How long to wait for the reason of calls that were not carried out, if the group seems well.
constexpr std::chrono::milliseconds kBreakGrace{5'000};
// How long a call of an epoch that has ended may still end by itself.
constexpr std::chrono::milliseconds kOldGrace{200};
// No doorbell rings for the end of a GPU's call. A wait polls without pause for kEagerWait, then every
// kLookAgain.
constexpr std::chrono::milliseconds kEagerWait{2};
constexpr std::chrono::microseconds kLookAgain{50};
constexpr int kLooksPerClock = 8;
constexpr std::chrono::milliseconds kLookAtDevice{100};

void set_outcome(CallOutcome& out, const Status& status, std::int32_t failed_rank) {
  out.status = status;
  out.result.status = static_cast<epd_status_t>(status.code());
  out.result.failed_rank = failed_rank;
}

KnownCall* find_call(Group& group, epd_ticket_t ticket) {
  KnownCall* const call = group.calls.find(ticket);
  return call != nullptr && call->waiting_hook.empty() ? call : nullptr;
}

// A replay belongs to the epoch in which the caller asks for it, whenever it was captured.
KnownCall* await_call(Group& group, epd_ticket_t ticket) {
  KnownCall* const call = find_call(group, ticket);
  if (call != nullptr && CallTicket::unpack(ticket).captured()) call->epoch = group.calls.epoch;
  return call;
}

void take_call(Group& group, KnownCall& call, const CallOutcome& out) {
  const CallTicket about = CallTicket::unpack(call.ticket);
  if (about.by_host) group.calls.note_host_end(call.ticket);
  if (about.captured()) {
    call.runs_taken = out.runs;
    call.missed_since = {};
  } else {
    group.calls.forget(call.ticket);
  }
}

// A running engine has ended a call of the host by then. A stream may reach its call at any time.
Deadline call_deadline(const KnownCall& call, std::int32_t timeout_ms) {
  const bool bounded = for_ever(timeout_ms) && CallTicket::unpack(call.ticket).by_host;
  if (!bounded) return Deadline::of_wait(timeout_ms);
  return Deadline::at(std::max(call.answer_by, SteadyClock::now() + kAnswerGrace));
}

}  // namespace

Status Operations::usable_locked(const Group& group) {
  connection_.note_end_locked();
  return connection_.ended().ok() ? group.usable_in(group.calls.epoch) : connection_.ended();
}

Status Operations::unknown_locked(epd_ticket_t ticket) const {
  const bool known = std::any_of(groups_.begin(), groups_.end(),
                                 [&](Group* other) { return other->calls.find(ticket) != nullptr; });
  return known ? of_another_group(ticket) : unknown_call(ticket);
}

// A call that was not carried out has failed with its group. Returns true when the board says why and the
// group has stopped everywhere.
bool Operations::missed_locked(const Group& group, KnownCall& call, bool failed, CallOutcome& out) const {
  const SteadyClock::time_point now = SteadyClock::now();
  if (call.missed_since == SteadyClock::time_point{}) call.missed_since = now;
  BoardSnapshot board;
  if (!group.board.snapshot(board)) return false;
  if (board.state == abi::GroupState::kLost || board.epoch > call.epoch || board.released >= call.epoch) {
    set_outcome(out, break_status(board), board.failed_rank);
    return true;
  }
  // There is no limit for that, because an engine may have to come back. A host device discards calls of a
  // group's epoch only after one has failed.
  if (failed || medium_->rings() || board.state == abi::GroupState::kBroken || !connection_.serving())
    call.missed_since = now;
  if (now < call.missed_since + kBreakGrace) return false;
  set_outcome(out,
              {StatusCode::kAborted,
               "the call was not carried out, and the group is well: it was enqueued before "
               "epd_group_resume had returned; synchronise the streams before it"},
              -1);
  return true;
}

bool Operations::ended_locked(const Group& group, KnownCall& call, CallOutcome& out) const {
  epd_result_init(&out.result);
  out.runs = call.runs_taken;
  out.result.runs = CallTicket::unpack(call.ticket).captured() ? call.runs_taken : 1;
  abi::CallEnd end;
  if (group.calls.ended(call, end)) {
    out.runs = end.runs;
    out.result.runs = end.runs;
    out.result.op_index = end.index;
    out.result.done_us = end.ran_us;
    out.result.num_recv_rows = end.num_recv_rows;
    out.result.num_dropped_selections = end.num_dropped;
    set_outcome(out, {}, -1);
    if (end.ending == abi::CallEnding::kCarriedOut) {
      if (call.room != 0 && end.num_recv_rows > call.room)
        set_outcome(out, too_many_rows(end.num_recv_rows, call.room), -1);
      return true;
    }
    out.result.num_recv_rows = 0;
    const bool failed = end.ending == abi::CallEnding::kFailed;
    if (connection_.ended().ok() && !group.left) return missed_locked(group, call, failed, out);
  }
  if (!connection_.ended().ok()) {
    set_outcome(out, connection_.ended(), -1);
    return true;
  }
  if (group.left) {
    set_outcome(out, {StatusCode::kAborted, "this rank has left the group"}, -1);
    return true;
  }
  if (!device_status_.ok() && !CallTicket::unpack(call.ticket).by_host) {
    set_outcome(out, device_status_, -1);
    return true;
  }
  // Nothing ends in a group that is lost.
  if (group.board.lost())
    return group.calls.ended(call, end) ? ended_locked(group, call, out)
                                        : missed_locked(group, call, false, out);
  // Perhaps nobody ever writes how the call ended: its engine may have died just then.
  if (group.board.epoch() <= call.epoch) {
    call.missed_since = {};
    return false;
  }
  const SteadyClock::time_point now = SteadyClock::now();
  if (call.missed_since == SteadyClock::time_point{}) call.missed_since = now;
  return now >= call.missed_since + kOldGrace && missed_locked(group, call, false, out);
}

bool Operations::overdue_locked(Group& group) {
  return group.calls.host_calls_due(SteadyClock::now() + kAnswerGrace);
}

bool Operations::failed_locked(Group& group) const {
  if (!medium_->rings()) return false;
  std::uint32_t ends[2] = {};
  const Status read = medium_->read(CallPlaces{group.call_words()}.done(), ends);
  return read.ok() && ends[1] != group.calls.failed && group.board.epoch() == group.calls.epoch;
}

void Operations::look_at_device() {
  {
    const Lock lock = waits_.lock();
    const SteadyClock::time_point now = SteadyClock::now();
    if (!device_status_.ok() || now - last_device_look_ < kLookAtDevice) return;
    last_device_look_ = now;
  }
  const Status status = medium_->check();
  if (status.ok()) return;
  const Lock lock = waits_.lock();
  device_status_ = {status.code(), "nothing runs in the streams of this CUDA context any more (" +
                                       status.message() +
                                       "): a kernel has faulted; does num_tokens_at point to device memory?"};
}

template <typename Done, typename There>
bool Operations::look_until(Lock& lock, Deadline deadline, Done done, There there) {
  if (!medium_->rings()) return poll_until(lock, deadline, done);
  class CallWaiter final : public Waiter {
   public:
    CallWaiter(Done& done_now, There& may_be) : done_(done_now), there_(may_be) {}
    bool ready() override { return done_(); }
    bool glance() const override { return there_(); }

   private:
    Done& done_;
    There& there_;
  } waiter(done, there);
  return waits_.wait(lock, waiter, deadline);
}

// Where no doorbell rings.
template <typename Done>
bool Operations::poll_until(Lock& lock, Deadline deadline, Done done) {
  connection_.note_end_locked();
  if (done()) return true;
  const SteadyClock::time_point eager_until = SteadyClock::now() + kEagerWait;
  while (!deadline.passed()) {
    lock.unlock();
    if (SteadyClock::now() < eager_until) {
      for (int i = 0; i < kLooksPerClock; ++i) ::sched_yield();
    } else {
      std::this_thread::sleep_for(kLookAgain);
      look_at_device();
    }
    connection_.probe();
    lock.lock();
    connection_.note_end_locked();
    if (done()) return true;
  }
  // A caller that only polls must also see the daemon's death.
  lock.unlock();
  look_at_device();
  connection_.probe();
  lock.lock();
  return done();
}

Status Operations::wait(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_result_t* result) {
  Lock lock = waits_.lock();
  KnownCall* call = await_call(group, ticket);
  if (call == nullptr) return unknown_call(ticket);
  CallOutcome out;
  const auto done = [&] {
    call = find_call(group, ticket);
    return call == nullptr || ended_locked(group, *call, out);
  };
  // A failed one may wait for the board to say why. The leader must sleep meanwhile.
  const bool ended = look_until(lock, call_deadline(*call, timeout_ms), done,
                                [&group, ticket] { return group.calls.ended_well(ticket); });
  if (call == nullptr) return unknown_call(ticket);
  if (!ended) return not_yet(ticket, timeout_ms, "has not completed", group.shape.span);
  if (result != nullptr) *result = out.result;
  const bool has_outputs = call->holds_outputs;
  take_call(group, *call, out);
  lock.unlock();
  if (has_outputs) finish_outputs(group, CallTicket::unpack(ticket).slot, ticket);
  return out.status;
}

bool Operations::pending(Group& group, epd_ticket_t ticket) {
  Lock lock = waits_.lock();
  const auto done = [&] {
    KnownCall* const call = group.calls.find(ticket);
    CallOutcome out;
    return call == nullptr || ended_locked(group, *call, out);
  };
  return !look_until(lock, Deadline::in_ms(0), done, [] { return false; });
}

template <typename Look>
Status Operations::look_at_call(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms,
                                const char* not_there, Look look) {
  Lock lock = waits_.lock();
  KnownCall* call = group.calls.find(ticket);
  if (call == nullptr) return unknown_call(ticket);
  CallOutcome out;
  bool ended = false;
  const auto look_at_both = [&] {
    call = group.calls.find(ticket);
    if (call == nullptr || look()) return true;
    ended = ended_locked(group, *call, out);
    return ended;
  };
  const bool done = look_until(lock, call_deadline(*call, timeout_ms), look_at_both, look);
  if (call == nullptr) return unknown_call(ticket);
  if (!done) return not_yet(ticket, timeout_ms, not_there, group.shape.span);
  return ended ? out.status : Status();
}

Status Operations::counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_counts_t& counts) {
  const CallTicket about = CallTicket::unpack(ticket);
  if (about.op != abi::Op::kDispatch) return no_dispatch(ticket, about.op);
  Status status =
      look_at_call(group, ticket, timeout_ms, "has no counts", [&] { return group.calls.counted(ticket); });
  if (!status.ok()) return status;
  const Lock lock = waits_.lock();
  if (!group.calls.counted(ticket)) return counts_replaced(ticket, about.slot);
  group.calls.read_counts(about.slot, counts);
  // Another dispatch may have overwritten them during the read.
  return group.calls.counted(ticket) ? Status() : counts_replaced(ticket, about.slot);
}

Status Operations::wait_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms) {
  {
    const Lock lock = waits_.lock();
    const KnownCall* const call = group.calls.find(ticket);
    if (call == nullptr) return unknown_call(ticket);
    if (!call->deferred) return not_deferred(ticket);
  }
  return look_at_call(group, ticket, timeout_ms, "has not finished reading its inputs",
                      [&] { return group.calls.sent(ticket); });
}

Status Operations::on_complete(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user) {
  const Lock lock = waits_.lock();
  KnownCall* const call = await_call(group, ticket);
  if (call == nullptr) return unknown_call(ticket);
  Status started = hooks_.start_locked();
  if (!started.ok()) return started;
  hooked_.emplace_back(&group, ticket);
  const epd_ticket_t outputs_of = call->holds_outputs ? ticket : 0;
  call->waiting_hook.push_back({&group, hook, user, {}, outputs_of, CallTicket::unpack(ticket).slot});
  hooks_.expect_locked();
  return {};
}

Status Operations::drop(Group& group, epd_ticket_t ticket) {
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  const Lock lock = waits_.lock();
  KnownCall* const call = find_call(group, ticket);
  if (call == nullptr) return unknown_call(ticket);
  if (std::exchange(call->holds_outputs, false)) group.outputs[CallTicket::unpack(ticket).slot].ticket = 0;
  group.calls.forget(ticket);
  return {};
}

bool Operations::take_hooked_locked() {
  std::erase_if(hooked_, [this](const auto& hooked) {
    Group& group = *hooked.first;
    KnownCall* const call = group.calls.find(hooked.second);
    CallOutcome out;
    if (call != nullptr && !ended_locked(group, *call, out)) return false;
    std::list<HookCall> ready;
    if (call != nullptr) {
      ready.splice(ready.end(), call->waiting_hook);
      ready.front().result = out.result;
      take_call(group, *call, out);
    }
    hooks_.ready_locked(ready);
    return true;
  });
  return !hooked_.empty() && !medium_->rings();
}

class BreakWaiter final : public Waiter {
 public:
  BreakWaiter(const Connection& connection, const Group& group) : connection_(connection), group_(group) {
    slice = std::chrono::milliseconds(1);
  }
  // Gives up after the group has seemed well for so long. Time without an engine does not count.
  bool ready() override {
    if (!connection_.ended().ok() || !group_.board.usable_in(group_.calls.epoch).ok()) return true;
    const SteadyClock::time_point now = SteadyClock::now();
    if (!connection_.serving()) well_since_ = now;
    return now >= well_since_ + kBreakGrace;
  }

 private:
  const Connection& connection_;
  const Group& group_;
  SteadyClock::time_point well_since_ = SteadyClock::now();
};

Status Operations::check(Group& group, epd_progress_t& progress) {
  connection_.probe();
  std::uint32_t ends[2] = {};
  std::uint64_t counted = 0;  // the epoch of Calls::failed before `ends` was read
  {
    const Lock lock = waits_.lock();
    counted = group.calls.epoch;
  }
  const Status memory = streams_.exists() ? mapper_.check_captured(group, true) : Status();
  const Status read = medium_->read(CallPlaces{group.call_words()}.done(), ends);
  Lock lock = waits_.lock();
  progress.next_op = group.board.next_index();
  progress.ended = ends[0] + group.calls.host_ended();
  progress.failed = ends[1];
  Status status = usable_locked(group);
  if (!status.ok()) return status;
  if (!read.ok()) return read;
  // Another thread has resumed meanwhile. It has reported what was read.
  if (group.calls.epoch != counted) return memory;
  const std::uint32_t lost = ends[1] - group.calls.failed;
  if (lost == 0) return memory;
  // The board says it a little later than this memory.
  BreakWaiter waiter(connection_, group);
  waits_.wait(lock, waiter, Deadline::in_ms(EPD_FOREVER));
  status = usable_locked(group);
  if (!status.ok()) return status;
  const char* const why =
      medium_->rings() ? ", and the group has not agreed on a break yet; call epd_group_resume"
                       : ", and the group is well: they were enqueued before epd_group_resume had returned; "
                         "synchronise the streams before it";
  return {StatusCode::kAborted, std::to_string(lost) + " calls were not carried out" + why};
}

}  // namespace epd::client
