// Session: operations that the client's streams and its host call, with no engine in between. See README,
// "Calls".
#include "session.h"
#include "ticket_status.h"

#include <sched.h>
#include <algorithm>
#include <thread>

namespace epd::client {
namespace {

// How long is waited for a group that seems well to say why calls were not carried out.
constexpr std::chrono::milliseconds kBreakGrace{5'000};
// How long a call of a group that is lost may still end by itself.
constexpr std::chrono::milliseconds kLostGrace{200};
// A wait for a call looks all the time for so long, as nobody rings for its end; then now and then.
constexpr std::chrono::milliseconds kEagerWait{2};
constexpr std::chrono::microseconds kLookAgain{50};
constexpr int kLooksPerClock = 8;
constexpr std::chrono::milliseconds kLookAtDevice{100};

// The engine counts a call's deadline from when it begins it, and others may come first: one on each slot,
// each of which may take all of its own. So long an engine that runs needs at most; whatever else ends a
// call also ends its waits, so to be generous costs nothing.
std::uint64_t limit_of(const Group& group) {
  const std::uint32_t longest_ms = std::max(group.default_timeout_ms, group.calls.longest_timeout_ms);
  const auto all = std::chrono::milliseconds(std::uint64_t{longest_ms} * group.shape.depth);
  return static_cast<std::uint64_t>(nanoseconds(all + kAnswerGrace).count());
}

Status check_call(const SubmitRequest& request) {
  if (request.num_tokens_at == nullptr) return {};
  if (!request.stream.any())
    return invalid_argument(
        "num_tokens_at is given with EPD_NO_STREAM; allowed: in a stream, which reads it");
  if (request.num_tokens != 0) return bad_value("num_tokens", request.num_tokens, "0 with num_tokens_at");
  if (request.handle != 0)
    return invalid_argument("num_tokens_at is given under a handle; allowed: NULL, n is its dispatch's");
  return {};
}

abi::Call call_of(const Group& group, SubmitRequest request, std::uint32_t route, bool flagged) {
  request.stream = {};  // the engine begins a call when it comes
  abi::Call call;
  call.op = request.op;
  call.slot = request.slot;
  call.flagged = flagged;
  call.flags = engine_flags(group.shape, request);
  call.sms = std::min(request.sms, abi::kMostCommandSms);
  if (abi::makes_routing(call.op, call.flags)) call.num_tokens = request.num_tokens;
  if (route != kNoRoute) call.route = route;
  call.timeout_ms = request.timeout_ms;
  return call;
}

}  // namespace

Status Session::can_call_by_stream() const {
  const Status kernels = attachment_.device->can_wait_by(WaitBy::kKernel);
  if (kernels.ok()) return {};
  return {kernels.code(),
          "operations in streams of " +
              std::string(attachment_.welcome.device, abi::text_length(attachment_.welcome.device)) +
              " need libepd's kernels: " + kernels.message() + "; allowed: EPD_NO_STREAM"};
}

Status Session::open_calls(Group& group) {
  if (!group.calls.by_calls()) return {};
  Status status = write_epoch(group, group.epoch);
  // The arena will be unmapped: nothing may be on its way there.
  if (!status.ok()) [[maybe_unused]]
    const Status finished = attachment_.device->finish_aside();
  return status;
}

// What was discarded before the epoch stood there has been told of.
Status Session::write_epoch(Group& group, std::uint64_t epoch) {
  Device& device = *attachment_.device;
  const CommandPlaces at{group.command_words()};
  std::uint32_t ends[2] = {};
  Status status = device.write_aside(at.epoch(), static_cast<std::uint32_t>(epoch));
  if (status.ok()) status = device.read_aside(at.done(), ends);
  if (!status.ok()) return status;
  const Lock lock(mutex_);
  group.calls.begin_epoch(epoch, ends[1]);
  return {};
}

Status Session::usable_for_calls(const Group& group) {
  note_ended_locked();
  if (!ended_.ok()) return ended_;
  if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
  return group.board.usable_in(group.calls.epoch);
}

// A record is a place here, and not one dispatch: what it holds, commands decide as they run.
Status Session::choose_call_route(Group& group, const SubmitRequest& request, RouteUse& use) {
  if (request.op == abi::Op::kNoop) return {};
  if (request.op == abi::Op::kDispatch && request.handle == 0) {
    if (!request.keep) {
      use = {request.slot, true};
      return {};
    }
    if (group.free_routes.empty()) return no_handle_left(group);
    use = {group.free_routes.back(), true};
    group.free_routes.pop_back();
    return {};
  }
  const std::uint64_t route = route_of(request.handle);
  const std::string name = "handle " + std::to_string(request.handle);
  if (request.handle != make_handle(0, static_cast<std::uint32_t>(route)) || route >= group.routes.size())
    return not_found(name + " was never given in this group");
  use.route = static_cast<std::uint32_t>(route);
  // A rank that has rejoined may be asked to combine what came before its time.
  if (group.routes[route].state == Route::State::kKnown || group.first_index != 0) return {};
  return not_found(name + (route < group.shape.depth ? " is of a slot that has had no dispatch"
                                                     : " is not kept any more"));
}

// ---- making calls

// What stands in the way of a call of the host: the slot's last one, or no room.
Status Session::admit_host_call(Lock& lock, Group& group, const SubmitRequest& request) {
  if (const epd_ticket_t ticket = group.calls.host_call_on(request.slot); ticket != 0) {
    return blocked(lock, "slot " + std::to_string(request.slot) + " has ticket " + std::to_string(ticket) +
                             " in flight");
  }
  if (group.calls.has_host_room()) return {};
  return blocked(lock,
                 "the rank's ring is full: " + std::to_string(abi::kCommandSlots) + " calls have not ended");
}

Status Session::prepare_call(Lock& lock, Group& group, const SubmitRequest& request, bool captured,
                             MadeCall& made) {
  Status status = usable_for_calls(group);
  if (status.ok() && !request.stream.any()) status = admit_host_call(lock, group, request);
  if (status.ok()) status = choose_call_route(group, request, made.use);
  if (!status.ok()) return status;
  made.ticket = group.calls.begin(request.op, request.slot, !request.stream.any(), captured);
  if (made.ticket == 0)
    return blocked(lock, "all places for results belong to operations with hooks, or that use kept handles");
  made.call = call_of(group, request, made.use.route, attachment_.wait_by == WaitBy::kMemop);
  KnownCall& known = *group.calls.find(made.ticket);
  made.call.result = known.result;
  if (!captured && made.use.route != kNoRoute && made.use.route >= group.shape.depth)
    known.kept_route = made.use.route;
  group.calls.note_timeout(request.timeout_ms);
  made.limit_ns = limit_of(group);
  known.deferred = (request.flags & abi::kFlagDefer) != 0;
  known.answer_by = SteadyClock::now() + nanoseconds(made.limit_ns);
  if (!request.stream.any()) return {};
  status = start_watch_locked();
  group.calls.rung = group.calls.rung || status.ok();
  return status;
}

// Without the mutex: the driver makes its caller wait while a stream's queue is full.
Status Session::enqueue_call(Group& group, const SubmitRequest& request, MadeCall& made) {
  Device& device = *attachment_.device;
  if (request.stream.any()) {
    StreamCommand command;
    command.words = group.command_words();
    command.call = made.call;
    command.num_tokens_at = reinterpret_cast<std::uintptr_t>(request.num_tokens_at);
    command.waits = begins_and_waits(request);
    command.limit_ns = made.limit_ns;
    return device.command(request.stream.stream, command);
  }
  made.call.flagged = false;
  made.call.number = group.calls.host_tail;
  made.call.epoch = static_cast<std::uint32_t>(group.calls.epoch);
  return device.call(CommandPlaces{group.command_words()}.host_call(made.call.number), abi::pack(made.call));
}

Status Session::call(Group& group, const SubmitRequest& request, epd_ticket_t& ticket, epd_handle_t* handle) {
  const bool in_stream = request.stream.any();
  bool captured = false;
  Status status = check_call(request);
  if (status.ok() && in_stream) status = can_call_by_stream();
  if (status.ok() && in_stream) status = attachment_.device->check_stream(request.stream.stream, captured);
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  MadeCall made;
  {
    Lock lock(mutex_);
    status = prepare_call(lock, group, request, captured, made);
  }
  if (status.ok()) status = enqueue_call(group, request, made);
  {
    const Lock lock(mutex_);
    if (!status.ok()) {
      if (made.ticket != 0) group.calls.cancel(made.ticket);
      if (request.keep && made.use.writes) group.free_routes.push_back(made.use.route);
      return status;
    }
    if (!in_stream) group.calls.note_host_call(made.ticket);
    const epd_handle_t its = made.use.writes ? make_handle(0, made.use.route) : request.handle;
    if (made.use.writes) group.routes[made.use.route] = {Route::State::kKnown, its, 0, 0};
    if (handle != nullptr) *handle = its;
  }
  ticket = made.ticket;
  if (!in_stream || attachment_.wait_by == WaitBy::kKernel || (request.flags & abi::kFlagDefer) != 0)
    return {};
  return enqueue_wait(request.stream.stream, flag_of(group, CallTicket::unpack(ticket)), ticket);
}

StreamWait Session::flag_of(const Group& group, const CallTicket& about) {
  return {CommandPlaces{group.command_words()}.flag(abi::flag_of(about.op, about.slot)), 1, 0};
}

Status Session::wait_for_call_on_stream(Group& group, epd_ticket_t ticket, void* stream) {
  const CallTicket about = CallTicket::unpack(ticket);
  std::uint64_t limit_ns = 0;
  {
    const Lock lock(mutex_);
    // A stream would wait for another's until the group is left.
    if (group.calls.find(ticket) == nullptr) {
      const bool known = std::any_of(groups_.begin(), groups_.end(),
                                     [&](const auto& other) { return other->calls.find(ticket) != nullptr; });
      return known ? of_another_group(ticket) : unknown_call(ticket);
    }
    if (about.by_host) return not_in_stream(ticket);
    limit_ns = limit_of(group);
  }
  if (attachment_.wait_by == WaitBy::kKernel)
    return attachment_.device->await_command(stream, group.command_words(), about.slot, limit_ns);
  return attachment_.device->wait(stream, flag_of(group, about), WaitBy::kMemop);
}

// ---- how calls end

namespace {

void set_outcome(CallOutcome& out, const Status& status, std::int32_t failed_rank) {
  out.status = status;
  out.result.status = static_cast<epd_status_t>(status.code());
  out.result.failed_rank = failed_rank;
}

}  // namespace

// What was not carried out has failed with its group: that is to say why, and to have stopped everywhere.
bool Session::call_missed_locked(const Group& group, KnownCall& call, CallOutcome& out) const {
  const SteadyClock::time_point now = SteadyClock::now();
  if (call.missed_since == SteadyClock::time_point{}) call.missed_since = now;
  BoardSnapshot board;
  if (!group.board.snapshot(board)) return false;
  if (board.state == abi::GroupState::kLost || board.epoch > call.epoch) {
    set_outcome(out, break_status(board), board.culprit_rank);
    return true;
  }
  // However long that takes: an engine may have to come back.
  if (board.state == abi::GroupState::kBroken || !serving()) call.missed_since = now;
  if (now < call.missed_since + kBreakGrace) return false;
  set_outcome(out,
              {StatusCode::kAborted,
               "the call was not carried out, and the group is well: it was enqueued before "
               "epd_group_resume had returned; synchronise the streams before it"},
              -1);
  return true;
}

bool Session::call_ended_locked(const Group& group, KnownCall& call, CallOutcome& out) const {
  epd_result_init(&out.result);
  out.runs = call.runs_taken;
  abi::CallEnd end;
  if (group.calls.ended(call, end)) {
    out.runs = end.runs;
    out.result.runs = end.runs;
    out.result.op_index = end.index;
    out.result.done_us = end.ran_us;
    out.result.num_recv_rows = end.num_recv_rows;
    out.result.num_dropped_selections = end.num_dropped;
    set_outcome(out, {}, -1);
    if (end.ending == abi::CallEnding::kCarriedOut) return true;
    out.result.num_recv_rows = 0;
    if (ended_.ok() && !group.left) return call_missed_locked(group, call, out);
  }
  if (!ended_.ok()) {
    set_outcome(out, ended_, -1);
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
  // Nobody says how it has ended: its engine may be gone with the group, or have died just then.
  if (!group.board.lost() && group.board.epoch() <= call.epoch) {
    call.missed_since = {};
    return false;
  }
  const SteadyClock::time_point now = SteadyClock::now();
  if (call.missed_since == SteadyClock::time_point{}) call.missed_since = now;
  return now >= call.missed_since + kLostGrace && call_missed_locked(group, call, out);
}

KnownCall* Session::find_call_locked(Group& group, epd_ticket_t ticket) {
  KnownCall* const call = group.calls.find(ticket);
  return call != nullptr && call->waiting_hook.empty() ? call : nullptr;
}

// A replay is of the epoch in which the caller acts when it asks, whenever it was captured.
KnownCall* Session::await_call_locked(Group& group, epd_ticket_t ticket) {
  KnownCall* const call = find_call_locked(group, ticket);
  if (call != nullptr && CallTicket::unpack(ticket).captured()) call->epoch = group.calls.epoch;
  return call;
}

void Session::take_call_locked(Group& group, KnownCall& call, const CallOutcome& out) {
  const CallTicket about = CallTicket::unpack(call.ticket);
  if (about.by_host) group.calls.note_host_end(call.ticket);
  if (about.captured()) {
    call.runs_taken = out.runs;
    call.missed_since = {};
  } else {
    group.calls.forget(call.ticket);
  }
}

bool Session::device_look_due_locked() const {
  return device_status_.ok() && SteadyClock::now() - last_device_look_ >= kLookAtDevice;
}

void Session::look_at_device() {
  {
    const Lock lock(mutex_);
    if (!device_look_due_locked()) return;
    last_device_look_ = SteadyClock::now();
  }
  const Status status = attachment_.device->check();
  if (status.ok()) return;
  const Lock lock(mutex_);
  device_status_ = {status.code(), "nothing runs in the streams of this CUDA context any more (" +
                                       status.message() +
                                       "): a kernel has faulted; does num_tokens_at point to device memory?"};
}

// Until `done` says so. Nobody rings: it is looked for.
template <typename Done>
bool Session::look_until(Lock& lock, Deadline deadline, Done done) {
  note_ended_locked();
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
    probe();
    lock.lock();
    note_ended_locked();
    if (done()) return true;
  }
  // A caller that only polls must hear of the daemon's death too.
  lock.unlock();
  look_at_device();
  probe();
  lock.lock();
  return done();
}

// An engine that runs has ended a call of the host's by then; of a stream nobody knows when it gets there.
Deadline Session::call_deadline(const KnownCall& call, std::int32_t timeout_ms) {
  const bool bounded = for_ever(timeout_ms) && CallTicket::unpack(call.ticket).by_host;
  if (!bounded) return Deadline::of_wait(timeout_ms);
  return Deadline::at(std::max(call.answer_by, SteadyClock::now() + kAnswerGrace));
}

Status Session::wait_call(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_result_t* result) {
  Lock lock(mutex_);
  KnownCall* call = await_call_locked(group, ticket);
  if (call == nullptr) return unknown_call(ticket);
  CallOutcome out;
  const bool ended = look_until(lock, call_deadline(*call, timeout_ms), [&] {
    call = find_call_locked(group, ticket);
    return call == nullptr || call_ended_locked(group, *call, out);
  });
  if (call == nullptr) return unknown_call(ticket);
  if (!ended) return not_yet(ticket, timeout_ms, "has not completed");
  if (result != nullptr) *result = out.result;
  take_call_locked(group, *call, out);
  return out.status;
}

bool Session::call_pending(Group& group, epd_ticket_t ticket) {
  Lock lock(mutex_);
  KnownCall* const call = group.calls.find(ticket);
  CallOutcome out;
  return call != nullptr &&
         !look_until(lock, Deadline::in_ms(0), [&] { return call_ended_locked(group, *call, out); });
}

template <typename Look>
Status Session::look_at_call(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms,
                             const char* not_there, Look look) {
  Lock lock(mutex_);
  KnownCall* call = group.calls.find(ticket);
  if (call == nullptr) return unknown_call(ticket);
  CallOutcome out;
  bool ended = false;
  const bool done = look_until(lock, call_deadline(*call, timeout_ms), [&] {
    call = group.calls.find(ticket);
    if (call == nullptr || look()) return true;
    ended = call_ended_locked(group, *call, out);
    return ended;
  });
  if (call == nullptr) return unknown_call(ticket);
  if (!done) return not_yet(ticket, timeout_ms, not_there);
  return ended ? out.status : Status();
}

Status Session::call_counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms,
                            epd_counts_t& counts) {
  const CallTicket about = CallTicket::unpack(ticket);
  if (about.op != abi::Op::kDispatch) return no_dispatch(ticket, about.op);
  Status status =
      look_at_call(group, ticket, timeout_ms, "has no counts", [&] { return group.calls.counted(ticket); });
  if (!status.ok()) return status;
  const Lock lock(mutex_);
  if (!group.calls.counted(ticket)) return counts_replaced(ticket, about.slot);
  group.calls.read_counts(about.slot, counts);
  // A dispatch may have overwritten them meanwhile.
  return group.calls.counted(ticket) ? Status() : counts_replaced(ticket, about.slot);
}

Status Session::call_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms) {
  {
    const Lock lock(mutex_);
    const KnownCall* const call = group.calls.find(ticket);
    if (call == nullptr) return unknown_call(ticket);
    if (!call->deferred) return not_deferred(ticket);
  }
  return look_at_call(group, ticket, timeout_ms, "still reads its inputs",
                      [&] { return group.calls.sent(ticket); });
}

Status Session::hook_call(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user) {
  const Lock lock(mutex_);
  KnownCall* const call = await_call_locked(group, ticket);
  if (call == nullptr) return unknown_call(ticket);
  Status started = start_hooks_locked();
  if (!started.ok()) return started;
  hooked_calls_.emplace_back(&group, ticket);
  call->waiting_hook.push_back({&group, hook, user, {}});
  ++hooks_outstanding_;
  hook_wake_.notify_one();
  notify_ready_locked(nullptr);
  kick();  // the thread may be the leader, asleep for longer
  return {};
}

void Session::take_hooked_calls_locked() {
  std::erase_if(hooked_calls_, [this](const auto& hooked) {
    Group& group = *hooked.first;
    KnownCall* const call = group.calls.find(hooked.second);
    CallOutcome out;
    if (call != nullptr && !call_ended_locked(group, *call, out)) return false;
    if (call != nullptr) {
      std::list<HookCall> ready;
      ready.splice(ready.end(), call->waiting_hook);
      ready.front().result = out.result;
      ready_hooks_.splice(ready_hooks_.end(), ready);
      take_call_locked(group, *call, out);
    }
    --hooks_outstanding_;
    return true;
  });
}

// What streams enqueue counts again from here on.
Status Session::renew_calls(Group& group) {
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  std::uint64_t epoch = 0;
  {
    const Lock lock(mutex_);
    epoch = group.epoch;
    if (group.calls.epoch == epoch) return {};
  }
  return write_epoch(group, epoch);
}

// ---- how all is -----------------------------------------------------------------------------------

class BreakWaiter final : public Waiter {
 public:
  BreakWaiter(const Session& session, const Group& group) : session_(session), group_(group) {
    slice = std::chrono::milliseconds(1);
  }
  // Gives up when it has seemed well for so long: an engine may have to come back.
  bool ready() override {
    if (!session_.ended_.ok() || !group_.board.usable_in(group_.calls.epoch).ok()) return true;
    const SteadyClock::time_point now = SteadyClock::now();
    if (!session_.serving()) well_since_ = now;
    return now >= well_since_ + kBreakGrace;
  }

 private:
  const Session& session_;
  const Group& group_;
  SteadyClock::time_point well_since_ = SteadyClock::now();
};

Status Session::check_group(Group& group, epd_progress_t& progress) {
  probe();
  std::uint32_t ends[2] = {};
  Status read;
  std::uint64_t counted = 0;  // the epoch that Commands::failed belonged to before `ends` were read
  if (group.calls.by_calls()) {
    {
      const Lock lock(mutex_);
      counted = group.calls.epoch;
    }
    read = attachment_.device->read_aside(CommandPlaces{group.command_words()}.done(), ends);
  }
  Lock lock(mutex_);
  drain_locked();
  note_ended_locked();
  progress.next_op = group.board.next_index();
  progress.ended = ends[0];
  if (group.calls.by_calls()) progress.ended += group.calls.host_ended();
  progress.failed = ends[1];
  if (!group.calls.by_calls()) {
    if (!ended_.ok()) return ended_;
    if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
    return group.board.usable_in(group.epoch);
  }
  Status status = usable_for_calls(group);
  if (!status.ok()) return status;
  if (!read.ok()) return read;
  // A resume of another thread's has come between: what was read is of before it, and told of by it.
  if (group.calls.epoch != counted) return {};
  const std::uint32_t lost = ends[1] - group.calls.failed;
  if (lost == 0) return {};
  // The engine hears of it a little later than this memory.
  BreakWaiter waiter(*this, group);
  wait(lock, waiter, Deadline::in_ms(EPD_FOREVER));
  status = usable_for_calls(group);
  if (!status.ok()) return status;
  return {StatusCode::kAborted,
          std::to_string(lost) +
              " calls were not carried out, and the group is well: they were enqueued "
              "before epd_group_resume had returned; synchronise the streams before it"};
}

}  // namespace epd::client
