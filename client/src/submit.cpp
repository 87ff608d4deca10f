// Session: from a checked call to a slot in the ring.
#include "session.h"

#include <ctime>

namespace epd::client {
namespace {

// What may be in flight in a session that uses streams. An application that sleeps in a call of CUDA's takes
// no completions, and an engine that finds no room for them takes no submissions, for which the stream may
// wait. So there is room for all, and for a few that come twice because engines died.
constexpr std::size_t kMostUnseen = abi::kCompletionSlots - 4;

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
  if (request.keep && request.handle != 0) {
    return bad_value("keep_handle", 1, "0 under a handle: its routing stays as long as it was to stay");
  }
  if (request.num_tokens_at != nullptr && !group.calls.by_calls()) {
    return invalid_argument(
        "num_tokens_at is given; allowed: NULL, but on GPUs that the daemon serves by resident kernels");
  }
  return {};
}

}  // namespace

std::uint64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

std::uint32_t engine_flags(const abi::GroupShape& shape, const SubmitRequest& request) {
  std::uint32_t flags = request.flags;
  if (request.op == abi::Op::kDispatch && request.handle != 0) flags |= abi::kFlagCached;
  if (request.stream.any()) flags |= abi::kFlagStream;
  if (shape.layout != abi::Layout::kPacked) flags &= ~std::uint32_t{abi::kFlagZeroPadding};
  return flags;
}

// Nobody may be waiting who would notice that the daemon is gone, so look.
Status Session::blocked(Lock& lock, std::string why) {
  lock.unlock();
  probe();
  lock.lock();
  return ended_.ok() ? would_block(std::move(why)) : ended_;
}

Status Session::ready_to_submit(Lock& lock, Group& group, const SubmitRequest& request) {
  const auto in_flight = [&] { return group.slot_busy(request.slot, request.stream); };
  // In a stream nothing else may ever look: the engine needs room for what it completes.
  if (request.stream.any() || in_flight() != nullptr) drain_locked();
  note_ended_locked();
  if (!ended_.ok()) return ended_;
  if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
  Status status = group.board.usable_in(group.epoch);
  if (!status.ok()) return status;
  if (const InFlight* op = in_flight(); op != nullptr) {
    return blocked(lock, "slot " + std::to_string(request.slot) + " has ticket " +
                             std::to_string(op->ticket) + " in flight" +
                             (op->stream.any() ? ", in another stream" : ""));
  }
  return {};
}

// A routing is written by one operation at a time, and not while others read it.
Status Session::choose_route(Lock& lock, Group& group, const SubmitRequest& request, RouteUse& use) {
  if (request.op == abi::Op::kNoop) return {};
  if (request.op == abi::Op::kCombine || request.handle != 0) {
    Status status = group.find_route(request.handle, use.route);
    if (!status.ok()) return status;
    const Route& route = group.routes[use.route];
    if (request.num_tokens != 0 && route.state == Route::State::kKnown &&
        request.num_tokens != route.num_tokens) {
      return bad_value("num_tokens", request.num_tokens,
                       "0, or " + std::to_string(route.num_tokens) + " as in the dispatch of handle " +
                           std::to_string(request.handle));
    }
  } else if (request.keep) {
    // Completions that nobody has seen yet may give records back.
    if (group.free_routes.empty()) drain_locked();
    if (group.free_routes.empty()) return no_handle_left(group);
    use = {group.free_routes.back(), true};
  } else {
    use = {request.slot, true};
  }
  if (group.route_busy(use.route, use.writes, request.stream)) drain_locked();
  if (!group.route_busy(use.route, use.writes, request.stream)) return {};
  return blocked(lock, use.writes ? "an operation in flight on another slot uses the routing of slot " +
                                        std::to_string(request.slot)
                                  : "the dispatch of handle " + std::to_string(request.handle) +
                                        " is in flight on another slot");
}

Status Session::no_handle_left(const Group& group) {
  return {StatusCode::kResourceExhausted,
          "no handle is left to keep: the group's num_handles is " + std::to_string(group.shape.num_handles)};
}

Status Session::no_room(Lock& lock) {
  const std::uint64_t head = b().submission_head.value.load(std::memory_order_acquire);
  if (submission_tail_ - head > abi::kSubmissionSlots) {
    return internal_error("the engine's submission index " + std::to_string(head) +
                          " does not fit the client's " + std::to_string(submission_tail_));
  }
  drain_locked();  // an engine without room for its completions takes nothing
  return blocked(lock, "the session's ring is full: " + std::to_string(abi::kSubmissionSlots) +
                           " submissions wait for the engine");
}

Status Session::admit(Lock& lock, Group& group, const SubmitRequest& request, RouteUse& use) {
  Status status = ready_to_submit(lock, group, request);
  if (!status.ok()) return status;
  use = {};
  status = choose_route(lock, group, request, use);
  if (!status.ok()) return status;
  if (watch_thread_.joinable() && num_in_flight_ >= kMostUnseen) drain_locked();
  if (watch_thread_.joinable() && num_in_flight_ >= kMostUnseen) {
    return blocked(lock, "the session's ring is full: " + std::to_string(num_in_flight_) +
                             " operations have not been seen to end");
  }
  const std::uint64_t head = b().submission_head.value.load(std::memory_order_acquire);
  return submission_tail_ - head < abi::kSubmissionSlots ? Status() : no_room(lock);
}

Status Session::push(Lock& lock, Group& group, const SubmitRequest& request, const RouteUse& use,
                     epd_ticket_t ticket) {
  const bool new_routing = request.op == abi::Op::kDispatch && use.writes;
  abi::Submission submission{};
  submission.ticket = ticket;
  submission.epoch = group.epoch;
  submission.handle = use.route != kNoRoute && !use.writes ? op_of(request.handle) : 0;
  submission.submit_ns = monotonic_ns();
  submission.op = request.op;
  submission.member = group.member;
  submission.slot = request.slot;
  submission.num_tokens = new_routing ? request.num_tokens : 0;
  submission.flags = engine_flags(group.shape, request);
  submission.timeout_ms = request.timeout_ms;
  submission.route = use.route != kNoRoute ? use.route : 0;
  submission.sms = request.sms;
  // Before the push: the completion may be there as soon as it is published.
  Operation& op = operations_[ticket];
  op.group = &group;
  op.op = request.op;
  op.slot = request.slot;
  op.deferred = (request.flags & abi::kFlagDefer) != 0;
  op.in_stream = request.stream.any();
  group.in_flight.push_back({ticket, request.slot, use.route, use.writes, request.stream});
  const std::uint32_t timeout_ms = request.timeout_ms != 0 ? request.timeout_ms : group.default_timeout_ms;
  op.answer_by = SteadyClock::now() + std::chrono::milliseconds(timeout_ms) + kAnswerGrace;
  if (abi::ring_push(a().submissions, submission_tail_, b().submission_head, submission) !=
      abi::PushResult::kPushed) {
    operations_.erase(ticket);
    group.in_flight.pop_back();
    return no_room(lock);  // though there was: the engine's index has gone wrong
  }
  ++submission_tail_;
  ++num_in_flight_;
  if (request.op != abi::Op::kNoop) ++group.next_index;
  return {};
}

Status Session::submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                       epd_handle_t* handle) {
  Status status = check_request(group, request);
  if (status.ok()) status = check_stream(request);
  if (!status.ok()) return status;
  if (group.calls.by_calls()) return call(group, request, ticket, handle);
  StreamWait wait;
  {
    const std::lock_guard<std::mutex> order(group.submit_mutex);
    Lock lock(mutex_);
    RouteUse use;
    status = admit(lock, group, request, use);
    if (!status.ok()) return status;
    // Used up whatever comes: should this not be published after all, no later operation on the slot may
    // find its ready word written already.
    const epd_ticket_t number = ++last_ticket_;
    if (request.stream.any()) {
      status = mark_ready(lock, group, request, number);
      // Meanwhile the session may have ended, the group broken, or other groups filled the ring.
      if (status.ok()) status = admit(lock, group, request, use);
      while (status.ok() && await_slot_release(lock, group, request.slot)) {
        status = admit(lock, group, request, use);
      }
      if (!status.ok()) return status;
    }
    const epd_handle_t made = use.writes ? make_handle(group.next_index, use.route) : request.handle;
    status = push(lock, group, request, use, number);
    if (!status.ok()) return status;
    ticket = number;
    if (use.writes) {
      if (request.keep) group.free_routes.pop_back();
      group.routes[use.route] = {Route::State::kKnown, made, ticket, request.num_tokens};
    }
    if (handle != nullptr) *handle = made;
    wait = end_of(group, operations_.at(number), number);
    lock.unlock();
    ring_engine(abi::kAsleep);
    // In the order of submission, as the ready words are written.
    if (begins_and_waits(request)) return begin_and_wait(group, request, wait, number);
  }
  if (!request.stream.any() || (request.flags & abi::kFlagDefer) != 0) return {};
  return enqueue_wait(request.stream.stream, wait, ticket);
}

Status Session::release_handle(Group& group, epd_handle_t handle) {
  Lock lock(mutex_);
  drain_locked();
  if (!ended_.ok()) return ended_;
  Status status = group.release_handle(handle);
  return status.code() == StatusCode::kWouldBlock ? blocked(lock, status.message()) : status;
}

}  // namespace epd::client
