// Makes a call in the rank's ring from a checked request.
#include "operations.h"
#include "staging.h"
#include "ticket_status.h"

#include <algorithm>

namespace epd::client {
namespace {

// Checks what the group's shape alone decides.
Status check_request(const Group& group, const SubmitRequest& request) {
  if (request.slot >= group.shape.depth) {
    return bad_value("slot", request.slot, "0 .. " + std::to_string(group.shape.depth - 1));
  }
  if (request.num_tokens > group.shape.max_tokens) {
    return bad_value("num_tokens", request.num_tokens, "0 .. " + std::to_string(group.shape.max_tokens));
  }
  const std::uint32_t biases = (request.flags & abi::kFlagBiases) >> abi::kBiasShift;
  if (biases > group.shape.num_biases) {
    return bad_value("num_biases", biases, "0 .. " + std::to_string(group.shape.num_biases));
  }
  if (request.row_format >= group.shape.num_formats()) {
    return bad_value("row_format", request.row_format,
                     "0 .. " + std::to_string(group.shape.num_formats() - 1));
  }
  if (request.keep && request.handle != 0) {
    return bad_value("keep_handle", 1, "0 under a handle: its routing stays as long as it was to stay");
  }
  return {};
}

// Flags as the engine accepts them. It ends sessions for flags that have no meaning.
std::uint32_t engine_flags(const abi::GroupShape& shape, const SubmitRequest& request) {
  std::uint32_t flags = request.flags | request.row_format << abi::kFormatShift;
  if (request.op == abi::Op::kDispatch && request.handle != 0) flags |= abi::kFlagCached;
  if (shape.layout != abi::Layout::kPacked) flags &= ~std::uint32_t{abi::kFlagZeroPadding};
  return flags;
}

// The error when no record is free for a kept handle.
Status no_handle_left(const Group& group) {
  return {StatusCode::kResourceExhausted,
          "no handle is left to keep: the group's num_handles is " + std::to_string(group.shape.num_handles)};
}

// How long a running engine needs for a call of a stream at most. The deadline counts from when the engine
// begins the call, and one call on each slot may come first and use all of its own time. Everything else that
// ends a call also ends its waits, so a large limit costs nothing.
std::uint64_t limit_of(const Group& group) {
  const std::uint32_t longest_ms = std::max(group.default_timeout_ms, group.calls.longest_timeout_ms);
  const auto all = std::chrono::milliseconds(std::uint64_t{longest_ms} * group.shape.depth);
  return static_cast<std::uint64_t>(nanoseconds(all + kAnswerGrace).count());
}

std::uint32_t timeout_of(const Group& group, const SubmitRequest& request) {
  return request.timeout_ms != 0 ? request.timeout_ms : group.default_timeout_ms;
}

Status check_call(const SubmitRequest& request) {
  if (request.num_tokens_at == nullptr) return {};
  if (!request.stream.any())
    return invalid_argument(
        "num_tokens_at is given with EPD_NO_STREAM; allowed: NULL, or on a GPU in a stream, which reads it");
  if (request.num_tokens != 0) return bad_value("num_tokens", request.num_tokens, "0 with num_tokens_at");
  if (request.handle != 0 && request.memory == nullptr)
    return invalid_argument("num_tokens_at is given under a handle; allowed: NULL, n is its dispatch's");
  return {};
}

// Memory of the caller's is copied in a stream.
Status check_memory(const SubmitRequest& request, const StreamPort& streams) {
  if (request.memory == nullptr || !streams.exists()) return {};
  if (!request.stream.any())
    return {
        StatusCode::kUnsupported,
        "memory is given with EPD_NO_STREAM on a CUDA device; allowed: memory in a stream, which copies it, "
        "or the slot's regions"};
  const Status kernels = streams.device().has_kernels();
  if (kernels.ok()) return {};
  return {kernels.code(),
          "memory is copied by libepd's kernels: " + kernels.message() + "; allowed: the slot's regions"};
}

abi::Call call_of(const Group& group, const SubmitRequest& request, std::uint32_t route, bool flagged) {
  abi::Call call;
  call.op = request.op;
  call.slot = request.slot;
  call.flagged = flagged;
  call.flags = engine_flags(group.shape, request);
  call.sms = std::min(request.sms, abi::kMaxCallSms);
  if (abi::makes_routing(call.op, call.flags)) call.num_tokens = request.num_tokens;
  if (route != kNoRoute) call.route = route;
  call.timeout_ms = request.timeout_ms;
  return call;
}

abi::CallWords* call_words(const Group& group) {
  return reinterpret_cast<abi::CallWords*>(group.call_words());
}

// The word that a MEMOP wait waits for.
std::uintptr_t flag_of(const Group& group, const CallTicket& about) {
  return CallPlaces{group.call_words()}.flag(abi::flag_of(about.op, about.slot));
}

}  // namespace

Status Operations::open(Group& group, const Packet& joined) {
  ResultsMemory results;
  const std::uint64_t bytes = abi::ResultsLayout(group.shape).total_bytes;
  Status status = medium_->map_results(joined.fds[2], bytes, results);
  if (!status.ok()) return status;
  group.calls.open(std::move(results), group.shape);
  status = write_epoch(group, group.epoch);
  if (!status.ok()) {
    // The arena will be unmapped, so no write to it may be pending.
    [[maybe_unused]] const Status finished = medium_->finish();
    return status;
  }
  const Lock lock = waits_.lock();
  groups_.push_back(&group);
  return {};
}

void Operations::forget_locked(const Group& group) {
  std::erase(groups_, &group);
}

// Calls that were discarded before the new epoch were reported in the old one.
Status Operations::write_epoch(Group& group, std::uint64_t epoch) {
  const CallPlaces at{group.call_words()};
  std::uint32_t ends[2] = {};
  Status status = medium_->write(at.epoch(), static_cast<std::uint32_t>(epoch));
  if (status.ok()) status = medium_->read(at.done(), ends);
  if (!status.ok()) return status;
  const Lock lock = waits_.lock();
  group.calls.begin_epoch(epoch, ends[1]);
  return {};
}

// False: the time is over.
bool Operations::await_discarded(Lock& lock, Group& group, Deadline deadline) {
  class DiscardWaiter final : public Waiter {
   public:
    DiscardWaiter(const Connection& connection, const Group& of) : connection_(connection), group_(of) {
      slice = std::chrono::milliseconds(1);
    }
    bool ready() override {
      return group_.calls.host_ended() == group_.calls.host_tail || !connection_.ended().ok() ||
             group_.left || !group_.board.usable_in(group_.epoch).ok();
    }

   private:
    const Connection& connection_;
    const Group& group_;
  } waiter(connection_, group);
  return waits_.wait(lock, waiter, deadline);
}

// From here on a GPU accepts what streams enqueue. A host device first discards the calls of the old epoch,
// so that they count as failed there.
Status Operations::renew(Group& group, Deadline deadline) {
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  std::uint64_t epoch = 0;
  {
    Lock lock = waits_.lock();
    epoch = group.epoch;
    if (group.calls.epoch == epoch) return {};
    if (medium_->rings() && !await_discarded(lock, group, deadline))
      return {StatusCode::kDeadlineExceeded,
              "this device's engine, which may be stopped, has not discarded the calls of the old epoch"};
  }
  return write_epoch(group, epoch);
}

// `closed` is written first, see abi::CallWords. Of a kernel that enqueues a call and this function, at least
// one sees the other's write.
void Operations::unblock(const Group& group) {
  const CallPlaces at{group.call_words()};
  // If this fails, the context or the driver is gone, and the streams with it.
  [[maybe_unused]] Status written = medium_->write(at.closed(), 1);
  for (std::uint32_t flag = 0; flag < abi::kCallFlags; ++flag) written = medium_->write(at.flag(flag), 1);
}

Status Operations::check_stream(const SubmitRequest& request, bool& captured) const {
  captured = false;
  if (!request.stream.any()) return {};
  if (!streams_.exists()) {
    const void* const stream = request.stream.stream;
    return invalid_argument((stream == nullptr
                                 ? std::string("stream is NULL, CUDA's legacy default stream")
                                 : "stream is " + std::to_string(reinterpret_cast<std::uintptr_t>(stream))) +
                            "; allowed: EPD_NO_STREAM, as this session's device is " +
                            std::string(welcome_.device, abi::text_length(welcome_.device)));
  }
  const Status kernels = streams_.device().has_kernels();
  if (kernels.ok()) return streams_.device().check_stream(request.stream.stream, captured);
  return {kernels.code(), "operations in streams of " +
                              std::string(welcome_.device, abi::text_length(welcome_.device)) +
                              " need libepd's kernels: " + kernels.message() + "; allowed: EPD_NO_STREAM"};
}

// A call of the host must wait for the last call on the slot, and for room.
Status Operations::admit_host_call(Lock& lock, Group& group, const SubmitRequest& request) {
  if (const epd_ticket_t ticket = group.calls.host_call_on(request.slot); ticket != 0) {
    return connection_.blocked(lock, "slot " + std::to_string(request.slot) + " has ticket " +
                                         std::to_string(ticket) + " in flight");
  }
  if (group.calls.has_host_room()) return {};
  return connection_.blocked(
      lock, "the rank's ring is full: " + std::to_string(abi::kCallSlots) + " calls have not ended");
}

// The kernel that makes a call looks for no room: it would write over one that has not been taken.
Status Operations::admit_stream_call(Lock& lock, Group& group, const SubmitRequest& request) {
  if (group.calls.has_stream_room()) return {};
  return connection_.blocked(
      lock,
      "slot " + std::to_string(request.slot) + ": the rank has " + std::to_string(abi::kCallSlots) +
          " operations with defer_receive that have not ended, and no stream waits for them; allowed: " +
          std::to_string(abi::kCallSlots - 1) +
          " before another one in a stream (epd_ticket_wait_on_stream, epd_ticket_wait)");
}

// Refuses what depends on the order of calls. On a host device no graph changes that order.
Status Operations::check_on_host(Lock& lock, Group& group, const SubmitRequest& request,
                                 std::uint32_t route) {
  const std::string handle = "the dispatch of handle " + std::to_string(request.handle);
  if (request.op == abi::Op::kDispatch && request.handle != 0) {
    const Route& its = group.routes[route];
    if (request.num_tokens == 0 || !its.tokens_known || request.num_tokens == its.num_tokens) return {};
    return bad_value("num_tokens", request.num_tokens,
                     "0, or " + std::to_string(its.num_tokens) + " as in " + handle);
  }
  if (request.op != abi::Op::kCombine || request.memory == nullptr) return {};
  // The host copies rows of y at once, and as many as their dispatch has counted.
  const std::uint32_t slot = group.slot_with_counts(route, request.slot);
  if (slot == group.shape.depth) return {};
  const epd_ticket_t by = group.counted[slot].by;
  if (group.calls.ended_badly(by))
    return connection_.blocked(lock, handle + " has failed, and the group has not agreed on that yet");
  if (group.calls.host_call_on(slot) != by) return {};
  return connection_.blocked(lock, handle + " is in flight, so the rows of memory.y are not counted yet");
}

Status Operations::prepare_call(Lock& lock, Group& group, const SubmitRequest& request, MadeCall& made) {
  const bool captured = made.rows.captured;
  Status status = usable_locked(group);
  if (status.ok() && !request.stream.any()) status = admit_host_call(lock, group, request);
  if (status.ok() && request.stream.any() && !captured) status = admit_stream_call(lock, group, request);
  if (status.ok()) status = choose_route(group, request, made.use);
  if (status.ok() && !streams_.exists()) status = check_on_host(lock, group, request, made.use.route);
  if (status.ok()) status = plan_copies(group, request, made.use, made.rows, made.copies);
  if (!status.ok()) return status;
  made.ticket = group.calls.begin(request.op, request.slot, !request.stream.any(), captured);
  if (made.ticket == 0)
    return connection_.blocked(
        lock, "all places for results belong to operations with hooks, or that use kept handles");
  made.call = call_of(group, request, made.use.route, streams_.wait_by(group) == WaitBy::kMemop);
  if (made.rows.places.any()) made.call.flags |= abi::kFlagPlaces;
  KnownCall& known = *group.calls.find(made.ticket);
  made.call.result = known.result;
  if (!captured && made.use.route != kNoRoute && made.use.route >= group.shape.depth)
    known.kept_route = made.use.route;
  group.calls.note_timeout(request.timeout_ms);
  made.limit_ns = limit_of(group);
  known.deferred = request.deferred();
  known.staged = made.copies.any();
  if (request.op == abi::Op::kDispatch) known.room = room_for_rows(made.copies);
  if (known.staged && known.deferred) known.copies = std::make_unique<Copies>(made.copies);
  // On a host device only calls of the host come first.
  const std::chrono::milliseconds its{group.calls.host_timeouts_ms() + timeout_of(group, request)};
  known.answer_by =
      SteadyClock::now() + (streams_.exists() ? nanoseconds(made.limit_ns) : nanoseconds(its + kAnswerGrace));
  if (!request.stream.any()) return {};
  status = streams_.start_watch_locked();
  group.calls.in_streams = group.calls.in_streams || status.ok();
  return status;
}

// Without the mutex, because the driver's call blocks while a stream's queue is full.
Status Operations::enqueue(Group& group, const SubmitRequest& request, MadeCall& made) {
  if (request.stream.any()) {
    stream_kernels::StagedStep step;
    step.calls = true;
    step.words = call_words(group);
    step.call = abi::halves_of(made.call);
    if (abi::makes_routing(made.call.op, made.call.flags)) step.call_tokens_at = request.num_tokens_at;
    step.places = made.rows.places;
    step.copies = made.copies;
    if (made.copies.any()) step.staging = group.staging_words(request.slot);
    if (streams_.wait_by(group) == WaitBy::kKernel && !request.deferred() && !made.copies.many()) {
      step.wait = stream_kernels::Wait::kCall;
      step.limit_ns = made.limit_ns;
    } else {
      step.copies.num_out = 0;
    }
    return streams_.device().launch(request.stream.stream, request.op, step);
  }
  made.call.flagged = false;
  made.call.number = group.calls.host_tail;
  made.call.epoch = static_cast<std::uint32_t>(group.calls.epoch);
  const CallPlaces at{group.call_words()};
  Status called = medium_->call(at.host_call(made.call.number), abi::pack(made.call));
  if (called.ok()) made.bell_set = medium_->ring(at.host_bell());
  return called;
}

// The outputs of the slot's last call come first: the next one may overwrite them.
void Operations::copy_by_host(Group& group, std::uint32_t slot, const MadeCall& made) {
  copy_outputs(group, slot);
  if (!made.copies.any()) return;
  copy_in(made.copies);
  if (made.copies.num_out == 0) return;
  group.outputs[slot] = {made.ticket, made.copies};
  const Lock lock = waits_.lock();
  group.calls.find(made.ticket)->holds_outputs = true;
}

void Operations::copy_outputs(Group& group, std::uint32_t slot) {
  Outputs& outputs = group.outputs[slot];
  if (outputs.ticket == 0) return;
  bool well = false;
  {
    const Lock lock = waits_.lock();
    well = group.calls.ended_well(outputs.ticket);
    group.calls.outputs_done(outputs.ticket);
  }
  if (well) copy_out(outputs.copies);
  outputs.ticket = 0;
}

void Operations::finish_outputs(Group& group, std::uint32_t slot, epd_ticket_t ticket) {
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  if (group.outputs[slot].ticket == ticket) copy_outputs(group, slot);
}

Status Operations::submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                          epd_handle_t* handle) {
  const bool in_stream = request.stream.any();
  MadeCall made;
  Status status = check_request(group, request);
  if (status.ok()) status = check_call(request);
  if (status.ok()) status = check_memory(request, streams_);
  if (status.ok()) status = check_stream(request, made.rows.captured);
  if (status.ok() && streams_.exists() && !made.rows.captured) status = mapper_.check_captured(group, false);
  if (!status.ok()) return status;
  if (streams_.exists()) made.rows.memory = mapper_.look_up(group, request, made.rows.captured);
  const std::lock_guard<std::mutex> order(group.submit_mutex);
  bool news = made.rows.memory.mapped;
  {
    Lock lock = waits_.lock();
    const bool knew = group.mapped.has_counts();
    status = prepare_call(lock, group, request, made);
    news = news || group.mapped.has_counts() != knew;
  }
  if (status.ok() && !streams_.exists()) copy_by_host(group, request.slot, made);
  if (news) streams_.kick_watch();  // which starts with the first call at the latest
  if (status.ok()) status = enqueue(group, request, made);
  {
    const Lock lock = waits_.lock();
    if (!status.ok()) {
      if (made.ticket != 0) group.calls.cancel(made.ticket);
      if (request.keep && made.use.writes) group.free_routes.push_back(made.use.route);
      return status;
    }
    if (!in_stream) {
      group.calls.note_host_call(made.ticket, timeout_of(group, request),
                                 group.calls.find(made.ticket)->answer_by);
    }
    if (in_stream && !made.rows.captured) group.calls.note_stream_call(made.ticket);
    if (!request.deferred()) group.calls.note_stream_wait(made.ticket);
    const epd_handle_t its = made.use.writes ? make_handle(group.comebacks, made.use.route) : request.handle;
    if (made.use.writes)
      group.routes[made.use.route] = {its, made.ticket, request.num_tokens, request.num_tokens_at == nullptr};
    if (request.op == abi::Op::kDispatch) group.note_counts(request.slot, made.use.route, made.ticket);
    if (handle != nullptr) *handle = its;
  }
  ticket = made.ticket;
  if (!in_stream) return submitted_but(made.bell_set, ticket, "the device may not begin it");
  if (request.deferred()) return {};
  if (streams_.wait_by(group) == WaitBy::kKernel) {
    if (!made.copies.many()) return {};
    const Status waited =
        await_and_copy(group, request.stream.stream, request.op, request.slot, made.limit_ns, made.copies);
    return submitted_but(waited, ticket, "the stream does not wait for it, or does not copy its outputs");
  }
  return streams_.wait_after(
      group, request.stream.stream,
      {request.op, request.slot, flag_of(group, CallTicket::unpack(ticket)), ticket, made.copies});
}

// For the last call on the slot that is earlier in the stream. Then its outputs: by the same kernel, unless
// that would have many blocks.
Status Operations::await_and_copy(Group& group, void* stream, abi::Op op, std::uint32_t slot,
                                  std::uint64_t limit_ns, const Copies& copies) {
  Device& device = streams_.device();
  stream_kernels::StagedStep copy;
  copy.copies = copies;
  copy.copies.num_in = 0;
  if (copies.num_out != 0) copy.staging = group.staging_words(slot);
  const bool apart = copy.staging != nullptr && copies.many();
  stream_kernels::StagedStep wait = apart ? stream_kernels::StagedStep() : copy;
  wait.wait = stream_kernels::Wait::kLastCall;
  wait.words = call_words(group);
  wait.slot = static_cast<std::uint8_t>(slot);
  wait.limit_ns = limit_ns;
  const Status status = device.launch(stream, op, wait);
  return apart && status.ok() ? device.launch(stream, op, copy) : status;
}

Status Operations::wait_on_stream(Group& group, epd_ticket_t ticket, void* stream) {
  if (stream == EPD_NO_STREAM) return invalid_argument("stream is EPD_NO_STREAM; allowed: a stream");
  const CallTicket about = CallTicket::unpack(ticket);
  Copies copies;
  std::uint64_t limit_ns = 0;
  bool copied = false;
  {
    const Lock lock = waits_.lock();
    // For another group's ticket the stream would wait until the group is left.
    KnownCall* const call = group.calls.find(ticket);
    if (call == nullptr) return unknown_locked(ticket);
    if (about.by_host) return not_in_stream(ticket);
    copied = call->staged && call->copies == nullptr;
    if (call->copies != nullptr) copies = *call->copies;
    call->copies.reset();
    group.calls.note_stream_wait(ticket);
    limit_ns = limit_of(group);
  }
  if (copied) return streams_.wait_for_copies(group, stream, about.slot, ticket);
  if (streams_.wait_by(group) == WaitBy::kMemop) {
    return streams_.wait_after(group, stream, {about.op, about.slot, flag_of(group, about), ticket, copies});
  }
  return await_and_copy(group, stream, about.op, about.slot, limit_ns, copies);
}

// Here a handle names a record, not one dispatch. Which routing it holds depends on the calls
// that have run.
Status Operations::choose_route(Group& group, const SubmitRequest& request, RouteUse& use) {
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
  if (request.handle == 0 && group.first_index != 0) return group.find_earlier(request, use.route);
  const std::uint64_t route = route_of(request.handle);
  const std::string name = "handle " + std::to_string(request.handle);
  if (comebacks_of(request.handle) < group.comebacks) return group.check_early(request);
  if (request.handle != make_handle(group.comebacks, static_cast<std::uint32_t>(route)) ||
      route >= group.routes.size())
    return not_found(name + " was never given in this group");
  use.route = static_cast<std::uint32_t>(route);
  if (group.routes[route].handle != 0) return {};
  if (group.first_index != 0 && group.comebacks == 0) return group.check_early(request);
  return not_found(name + (route < group.shape.depth ? " is of a slot that has had no dispatch"
                                                     : " is not kept any more"));
}

Status Operations::release_handle(Group& group, epd_handle_t handle) {
  Lock lock = waits_.lock();
  connection_.note_end_locked();
  if (!connection_.ended().ok()) return connection_.ended();
  Status status = group.release_handle(handle);
  return status.code() == StatusCode::kWouldBlock ? connection_.blocked(lock, status.message()) : status;
}

}  // namespace epd::client
