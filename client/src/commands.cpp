// Session: operations that streams enqueue by themselves. See README, "Commands".
#include "commands.h"
#include "session.h"

#include <algorithm>

namespace epd::client {
namespace {

// How long epd_group_check waits for a group to say why commands were not carried out.
constexpr std::int64_t kBreakMs = 5'000;

// The engine counts a call's deadline from when it begins it, and others may come first: one on each slot,
// each of which may take all of its own. So long an engine that runs needs at most; whatever else ends a
// call also ends its waits, so to be generous costs nothing.
std::uint64_t limit_of(const Group& group) {
  const std::uint32_t longest_ms = std::max(group.default_timeout_ms, group.commands.longest_timeout_ms);
  const auto all = std::chrono::milliseconds(std::uint64_t{longest_ms} * group.shape.depth);
  return static_cast<std::uint64_t>(nanoseconds(all + kAnswerGrace).count());
}

Status check_command(const SubmitRequest& request) {
  if (!request.stream.any()) {
    return invalid_argument(
        "stream is EPD_NO_STREAM; allowed: a stream, as the group was joined with EPD_COMMANDS_BY_STREAM and "
        "its streams ask for operations");
  }
  if (request.num_tokens_at == nullptr) return {};
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

Status Session::can_command() const {
  if (attachment_.device == nullptr) {
    const abi::Welcome& welcome = attachment_.welcome;
    return bad_value("commands", EPD_COMMANDS_BY_STREAM,
                     "0 (EPD_COMMANDS_BY_HOST), as this session's device is " +
                         std::string(welcome.device, abi::text_length(welcome.device)));
  }
  const Status kernels = attachment_.device->can_wait_by(WaitBy::kKernel);
  if (kernels.ok()) return {};
  return {kernels.code(),
          "commands is 1 (EPD_COMMANDS_BY_STREAM), which needs libepd's kernels: " + kernels.message()};
}

Status Session::open_commands(Group& group) {
  if (!group.commands.by_stream) return {};
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
  group.commands.epoch = epoch;
  group.commands.failed = ends[1];
  return {};
}

Status Session::usable_for_commands(const Group& group) {
  note_ended_locked();
  if (!ended_.ok()) return ended_;
  if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
  return group.board.usable_in(group.commands.epoch);
}

// A record is a place here, and not one dispatch: what it holds, commands decide as they run.
Status Session::choose_command_route(Group& group, const SubmitRequest& request, RouteUse& use) {
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

Status Session::enqueue_command(const Group& group, const SubmitRequest& request, StreamCommand command) {
  command.words = group.command_words();
  command.num_tokens_at = reinterpret_cast<std::uintptr_t>(request.num_tokens_at);
  command.waits = begins_and_waits(request);
  return attachment_.device->command(request.stream.stream, command);
}

Status Session::command(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                        epd_handle_t* handle) {
  Status status = check_command(request);
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  RouteUse use;
  StreamCommand command;
  {
    const Lock lock(mutex_);
    status = usable_for_commands(group);
    if (status.ok()) status = choose_command_route(group, request, use);
    if (!status.ok()) return status;
    command.call = call_of(group, request, use.route, attachment_.wait_by == WaitBy::kMemop);
    status = start_watch_locked();
    group.commands.rung = group.commands.rung || status.ok();
    group.commands.note_timeout(request.timeout_ms);
    command.limit_ns = limit_of(group);
  }
  // Without the mutex: the driver makes its caller wait while a stream's queue is full.
  if (status.ok()) status = enqueue_command(group, request, command);
  {
    const Lock lock(mutex_);
    if (!status.ok()) {
      if (request.keep) group.free_routes.push_back(use.route);
      return status;
    }
    const epd_handle_t made = use.writes ? make_handle(0, use.route) : request.handle;
    if (use.writes) group.routes[use.route] = {Route::State::kKnown, made, 0, 0};
    if (handle != nullptr) *handle = made;
  }
  const CommandTicket about{request.slot, request.op};
  ticket = about.pack();
  if (attachment_.wait_by == WaitBy::kKernel || (request.flags & abi::kFlagDefer) != 0) return {};
  return enqueue_wait(request.stream.stream, flag_of(group, about), ticket);
}

StreamWait Session::flag_of(const Group& group, const CommandTicket& about) {
  return {CommandPlaces{group.command_words()}.flag(abi::flag_of(about.op, about.slot)), 1, 0};
}

Status Session::wait_for_command(const Group& group, epd_ticket_t ticket, void* stream) {
  const CommandTicket about = CommandTicket::unpack(ticket);
  std::uint64_t limit_ns = 0;
  {
    const Lock lock(mutex_);
    if (about.slot >= group.shape.depth || about.op > abi::Op::kCombine)
      return not_found("ticket " + std::to_string(ticket) + " was never issued in this group");
    limit_ns = limit_of(group);
  }
  if (attachment_.wait_by == WaitBy::kKernel)
    return attachment_.device->await_command(stream, group.command_words(), about.slot, limit_ns);
  return attachment_.device->wait(stream, flag_of(group, about), WaitBy::kMemop);
}

Status Session::refuse_command_ticket(const Group& group, epd_ticket_t ticket) {
  if (!group.commands.by_stream || !CommandTicket::is(ticket)) return {};
  return invalid_argument("ticket " + std::to_string(ticket) +
                          " is of a command, which has no result for the CPU; allowed: "
                          "epd_ticket_wait_on_stream, and epd_group_check for how commands have ended");
}

// What streams enqueue counts again from here on.
Status Session::renew_commands(Group& group) {
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  std::uint64_t epoch = 0;
  {
    const Lock lock(mutex_);
    epoch = group.epoch;
    if (group.commands.epoch == epoch) return {};
  }
  return write_epoch(group, epoch);
}

// ---- how all is -----------------------------------------------------------------------------------

class BreakWaiter final : public Waiter {
 public:
  BreakWaiter(const Session& session, const Group& group) : session_(session), group_(group) {
    slice = std::chrono::milliseconds(1);
  }
  bool ready() override {
    return !session_.ended_.ok() || !group_.board.usable_in(group_.commands.epoch).ok();
  }

 private:
  const Session& session_;
  const Group& group_;
};

Status Session::check_group(Group& group, epd_progress_t& progress) {
  probe();
  std::uint32_t ends[2] = {};
  Status read;
  std::uint64_t counted = 0;  // the epoch that Commands::failed belonged to before `ends` were read
  if (group.commands.by_stream) {
    {
      const Lock lock(mutex_);
      counted = group.commands.epoch;
    }
    read = attachment_.device->read_aside(CommandPlaces{group.command_words()}.done(), ends);
  }
  Lock lock(mutex_);
  drain_locked();
  note_ended_locked();
  progress.next_op = group.board.next_index();
  progress.ended = ends[0];
  progress.failed = ends[1];
  if (!group.commands.by_stream) {
    if (!ended_.ok()) return ended_;
    if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
    return group.board.usable_in(group.epoch);
  }
  Status status = usable_for_commands(group);
  if (!status.ok()) return status;
  if (!read.ok()) return read;
  // A resume of another thread's has come between: what was read is of before it, and told of by it.
  if (group.commands.epoch != counted) return {};
  const std::uint32_t lost = ends[1] - group.commands.failed;
  if (lost == 0) return {};
  // The engine hears of it a little later than this memory.
  BreakWaiter waiter(*this, group);
  wait(lock, waiter, Deadline::in_ms(kBreakMs));
  status = usable_for_commands(group);
  if (!status.ok()) return status;
  return {StatusCode::kAborted,
          std::to_string(lost) +
              " commands were not carried out, and the group is well: they were rung "
              "before epd_group_resume had returned; synchronise the streams before it"};
}

}  // namespace epd::client
