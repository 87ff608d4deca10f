// Makes a submission in the ring from a checked call.
#include "launched_operations.h"

#include "staging.h"
#include "ticket_status.h"

#include <algorithm>
#include <optional>

namespace epd::client {
namespace {

// How many operations may be in flight in a session that uses streams. An application that waits in a CUDA
// call takes no completions, and an engine without room for completions takes no submissions. So the ring has
// room for all completions, and for a few that come twice because engines died.
constexpr std::size_t kMostUnseen = abi::kCompletionSlots - 4;

// Streams compare 32 bits of a ticket, cyclically. A word that is 2^31 behind would look as if it were ahead.
constexpr std::uint64_t kStaleAfter = std::uint64_t{1} << 30;

std::uint32_t low(epd_ticket_t ticket) {
  return static_cast<std::uint32_t>(ticket);
}

// Sets the words of a slot, which no stream has used for so long, to just before the ticket.
Status renew_words(Device& device, const Group& group, std::uint32_t slot, epd_ticket_t ticket) {
  const std::uintptr_t base = group.user_base();
  Status status = device.write_aside(base + group.arena.ready_word(slot), low(ticket - 1));
  if (status.ok()) status = device.write_aside(base + group.arena.done_word(slot), low(ticket - 1));
  return status.ok() ? device.finish_aside() : status;
}

constexpr stream_kernels::Copies kNoCopies;

stream_kernels::StagedStep ready_step(std::uintptr_t ready, epd_ticket_t ticket) {
  stream_kernels::StagedStep step;
  step.begin = stream_kernels::Begin::kReady;
  step.ready = reinterpret_cast<std::uint32_t*>(ready);  // NOLINT: an address of the device
  step.value = low(ticket);
  return step;
}

}  // namespace

Status LaunchedOperations::check_stream(const StreamUse& use) const {
  if (!use.any()) return {};
  const void* const stream = use.stream;
  if (streams_.exists()) {
    bool captures = false;
    Status status = streams_.device().check_stream(use.stream, captures);
    if (!status.ok() || !captures) return status;
    return invalid_argument(
        "stream captures a graph; allowed: on GPUs that the daemon serves in mode resident");
  }
  return invalid_argument((stream == nullptr
                               ? std::string("stream is NULL, CUDA's legacy default stream")
                               : "stream is " + std::to_string(reinterpret_cast<std::uintptr_t>(stream))) +
                          "; allowed: EPD_NO_STREAM, as this session's device is " +
                          std::string(welcome_.device, abi::text_length(welcome_.device)));
}

Status LaunchedOperations::ready_to_submit(Lock& lock, Group& group, const SubmitRequest& request) {
  const auto in_flight = [&] { return group.slot_busy(request.slot, request.stream); };
  // For streams perhaps no other call ever takes completions, and the engine needs room for them.
  if (request.stream.any() || in_flight() != nullptr) take_news_locked();
  connection_.note_end_locked();
  if (!connection_.ended().ok()) return connection_.ended();
  Status status = group.usable_in(group.epoch);
  if (!status.ok()) return status;
  if (const InFlight* op = in_flight(); op != nullptr) {
    return connection_.blocked(lock, "slot " + std::to_string(request.slot) + " has ticket " +
                                         std::to_string(op->ticket) + " in flight" +
                                         (op->stream.any() ? ", in another stream" : ""));
  }
  return {};
}

// One operation at a time writes a routing, and none reads it meanwhile.
Status LaunchedOperations::choose_route(Lock& lock, Group& group, const SubmitRequest& request,
                                        RouteUse& use) {
  if (request.op == abi::Op::kNoop) return {};
  if (request.op == abi::Op::kCombine || request.handle != 0) {
    Status status = group.find_route(request, use.route);
    if (!status.ok()) return status;
    const Route& route = group.routes[use.route];
    if (request.num_tokens != 0 && route.state == Route::State::kKnown &&
        request.num_tokens != route.num_tokens) {
      return bad_value("num_tokens", request.num_tokens,
                       "0, or " + std::to_string(route.num_tokens) + " as in the dispatch of handle " +
                           std::to_string(request.handle));
    }
  } else if (request.keep) {
    // Completions that have not been taken yet may free records.
    if (group.free_routes.empty()) take_news_locked();
    if (group.free_routes.empty()) return no_handle_left(group);
    use = {group.free_routes.back(), true};
  } else {
    use = {request.slot, true};
  }
  if (group.route_busy(use.route, use.writes, request.stream)) take_news_locked();
  if (!group.route_busy(use.route, use.writes, request.stream)) return {};
  return connection_.blocked(
      lock,
      use.writes
          ? "an operation in flight on another slot uses the routing of slot " + std::to_string(request.slot)
          : "the dispatch of handle " + std::to_string(request.handle) + " is in flight on another slot");
}

Status LaunchedOperations::no_room(Lock& lock) {
  std::string full;
  Status status = ring_.check(full);
  if (!status.ok()) return status;
  take_news_locked();  // an engine without room for completions takes no submissions
  return connection_.blocked(lock, std::move(full));
}

Status LaunchedOperations::admit(Lock& lock, Group& group, const SubmitRequest& request, RouteUse& use) {
  Status status = ready_to_submit(lock, group, request);
  if (!status.ok()) return status;
  use = {};
  status = choose_route(lock, group, request, use);
  if (!status.ok()) return status;
  if (streams_.watches_locked() && completions_.num_in_flight() >= kMostUnseen) take_news_locked();
  if (streams_.watches_locked() && completions_.num_in_flight() >= kMostUnseen) {
    return connection_.blocked(lock,
                               "the session's ring is full: " + std::to_string(completions_.num_in_flight()) +
                                   " operations have not been seen to end");
  }
  return ring_.has_room() ? Status() : no_room(lock);
}

Status LaunchedOperations::push(Lock& lock, Group& group, const SubmitRequest& request, const RouteUse& use,
                                epd_ticket_t ticket) {
  const bool new_routing = request.op == abi::Op::kDispatch && use.writes;
  abi::Submission submission{};
  submission.ticket = ticket;
  submission.epoch = group.epoch;
  submission.handle = use.route != kNoRoute && !use.writes ? op_of(request.handle) : 0;
  const SteadyClock::time_point now = SteadyClock::now();  // CLOCK_MONOTONIC
  submission.submit_ns = static_cast<std::uint64_t>(nanoseconds(now.time_since_epoch()).count());
  submission.op = request.op;
  submission.member = group.member;
  submission.slot = request.slot;
  submission.num_tokens = new_routing ? request.num_tokens : 0;
  submission.flags = engine_flags(group.shape, request);
  submission.timeout_ms = request.timeout_ms;
  submission.route = use.route != kNoRoute ? use.route : 0;
  submission.sms = request.sms;
  // Before the push, because the completion may come as soon as it is published.
  Operation& op = completions_.add(ticket);
  op.group = &group;
  op.op = request.op;
  op.slot = request.slot;
  op.deferred = request.deferred();
  op.in_stream = request.stream.any();
  group.in_flight.push_back({ticket, request.slot, use.route, use.writes, request.stream});
  const std::uint32_t timeout_ms = request.timeout_ms != 0 ? request.timeout_ms : group.default_timeout_ms;
  op.answer_by = now + std::chrono::milliseconds(timeout_ms) + kAnswerGrace;
  if (!ring_.push(submission)) {
    completions_.withdraw(ticket);
    group.in_flight.pop_back();
    return no_room(lock);  // there was room before, so the engine's index is wrong
  }
  if (request.op != abi::Op::kNoop) ++group.next_index;
  return {};
}

// Makes the driver's calls without the session's mutex. They block while a stream's queue is full, and what
// empties the queue may need the mutex (completions, the end of the session).
Status LaunchedOperations::mark_ready(Lock& lock, Group& group, const SubmitRequest& request,
                                      const stream_kernels::Copies& copies, epd_ticket_t ticket) {
  Status status = streams_.start_watch_locked();
  if (!status.ok()) return status;
  // Set before anything is enqueued, so that a session that ends now unblocks this ticket too.
  SlotWords& words = group.words[request.slot];
  const epd_ticket_t before = words.last;
  const bool stale = ticket - before >= kStaleAfter;
  // Renewing the words would begin and end that operation.
  if (stale && group.stream_in_flight(request.slot)) {
    return would_block("slot " + std::to_string(request.slot) + " still has ticket " +
                       std::to_string(before) + " in flight, " + std::to_string(ticket - before) +
                       " tickets ago");
  }
  words.last = ticket;
  lock.unlock();
  Device& device = streams_.device();
  if (stale) status = renew_words(device, group, request.slot, ticket);
  if (status.ok() && !begins_and_waits(group, request)) {
    const std::uintptr_t ready = group.user_base() + group.arena.ready_word(request.slot);
    if (streams_.wait_by(group) == WaitBy::kMemop && !copies.any()) {
      status = device.write(request.stream.stream, ready, low(ticket));
    } else {
      stream_kernels::StagedStep step = ready_step(ready, ticket);
      step.copies = copies;
      step.copies.num_out = 0;
      if (copies.any()) step.staging = group.staging_words(request.slot);
      status = device.launch(request.stream.stream, request.op, step);
    }
  }
  lock.lock();
  if (!status.ok()) words.last = before;
  return status;
}

// A stream may reach the wait late. But a running engine ends the operation within this limit.
StreamWait LaunchedOperations::end_of(const Group& group, const Operation& op, epd_ticket_t ticket) {
  const auto limit = std::max<nanoseconds>(op.answer_by - SteadyClock::now(), kAnswerGrace);
  return {group.user_base() + group.arena.done_word(op.slot), low(ticket),
          static_cast<std::uint64_t>(limit.count())};
}

Status LaunchedOperations::begin_and_wait(const Group& group, const SubmitRequest& request,
                                          const StreamWait& wait, epd_ticket_t ticket) {
  stream_kernels::StagedStep step =
      ready_step(group.user_base() + group.arena.ready_word(request.slot), wait.value);
  step.wait = stream_kernels::Wait::kDone;
  step.done = reinterpret_cast<const std::uint32_t*>(wait.word);  // NOLINT: an address of the device
  step.limit_ns = wait.limit_ns;
  return submitted_but(streams_.device().launch(request.stream.stream, request.op, step), ticket,
                       "the stream neither lets it begin nor waits for it");
}

void LaunchedOperations::note_copies(Group& group, const SubmitRequest& request,
                                     const stream_kernels::Copies& copies, epd_ticket_t ticket) {
  if (!copies.any()) return;
  Operation& op = *completions_.find(ticket);
  op.staged = true;
  op.room = request.op == abi::Op::kDispatch ? room_for_rows(copies) : 0;
  if (streams_.exists()) {
    if (request.deferred()) op.copies = std::make_unique<stream_kernels::Copies>(copies);
    return;
  }
  op.has_outputs = true;
  group.ended_well[request.slot] = 0;
  group.outputs[request.slot] = {ticket, copies};
}

// The slot is free: its last operation has ended. Copies without the session's mutex.
void LaunchedOperations::copy_by_host(Lock& lock, Group& group, std::uint32_t slot,
                                      const stream_kernels::Copies& copies) {
  lock.unlock();
  copy_outputs(group, slot);
  group.outputs[slot].ticket = 0;
  copy_in(copies);
  lock.lock();
}

// What the stream does after the operation has been published.
Status LaunchedOperations::follow(Group& group, const SubmitRequest& request, const StreamWait& wait,
                                  const stream_kernels::Copies& copies, epd_ticket_t ticket) {
  if (!request.stream.any() || request.deferred()) return {};
  return streams_.wait_after(group, request.stream.stream, {request.op, request.slot, wait, ticket, copies});
}

Status LaunchedOperations::submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                                  epd_handle_t* handle) {
  Status status = check_request(group, request);
  if (status.ok()) status = check_stream(request.stream);
  if (status.ok()) status = check_memory(request, streams_);
  if (status.ok() && request.num_tokens_at != nullptr) {
    status = invalid_argument("num_tokens_at is given; allowed: NULL, but on GPUs");
  }
  if (!status.ok()) return status;
  StreamWait wait;
  std::optional<stream_kernels::Copies> planned;  // 600 bytes, so made only for the caller's own memory
  {
    const std::lock_guard<std::mutex> order(group.submit_mutex);
    Lock lock = waits_.lock();
    RouteUse use;
    status = admit(lock, group, request, use);
    if (status.ok() && request.memory != nullptr) {
      abi::RowPlaces none;  // no memory is registered
      status = plan_copies(group, request, use, false, planned.emplace(), none);
    }
    if (!status.ok()) return status;
    const stream_kernels::Copies& copies = planned ? *planned : kNoCopies;
    // The number is used even if the operation is not published. Otherwise a later operation on the slot
    // might find its ready word already written.
    const epd_ticket_t number = ++last_ticket_;
    // In the meantime the session may have ended, the group broken, or other groups filled the ring.
    if (request.stream.any()) {
      status = mark_ready(lock, group, request, copies, number);
      if (status.ok()) status = admit(lock, group, request, use);
      while (status.ok() && streams_.await_slot_unblock(lock, group, request.slot)) {
        status = admit(lock, group, request, use);
      }
    } else if (copies.any() || group.outputs[request.slot].ticket != 0) {
      copy_by_host(lock, group, request.slot, copies);
      status = admit(lock, group, request, use);
    }
    if (!status.ok()) return status;
    const epd_handle_t made = use.writes ? make_handle(group.next_index, use.route) : request.handle;
    status = push(lock, group, request, use, number);
    if (!status.ok()) return status;
    ticket = number;
    if (use.writes) {
      if (request.keep) group.free_routes.pop_back();
      group.routes[use.route] = {Route::State::kKnown, made, ticket, request.num_tokens, true};
    }
    if (request.op == abi::Op::kDispatch) group.note_counts(request.slot, use.route, number);
    note_copies(group, request, copies, number);
    if (handle != nullptr) *handle = made;
    if (request.stream.any()) wait = end_of(group, *completions_.find(number), number);
    lock.unlock();
    ring_.wake_engine(abi::kAsleep);
    // Under submit_mutex, so that ready words are written in the order of submission.
    if (begins_and_waits(group, request)) return begin_and_wait(group, request, wait, number);
  }
  return follow(group, request, wait, planned ? *planned : kNoCopies, ticket);
}

}  // namespace epd::client
