// Makes a submission in the ring from a checked call.
#include "submitted_operations.h"

#include "staging.h"
#include "ticket_status.h"

#include <algorithm>
#include <optional>

namespace epd::client {
namespace {

constexpr stream_kernels::Copies kNoCopies;

}  // namespace

Status SubmittedOperations::check_stream(const StreamUse& use) const {
  if (!use.any()) return {};
  const void* const stream = use.stream;
  return invalid_argument((stream == nullptr
                               ? std::string("stream is NULL, CUDA's legacy default stream")
                               : "stream is " + std::to_string(reinterpret_cast<std::uintptr_t>(stream))) +
                          "; allowed: EPD_NO_STREAM, as this session's device is " +
                          std::string(welcome_.device, abi::text_length(welcome_.device)));
}

Status SubmittedOperations::ready_to_submit(Lock& lock, Group& group, const SubmitRequest& request) {
  if (group.slot_busy(request.slot) != nullptr) take_news_locked();
  connection_.note_end_locked();
  if (!connection_.ended().ok()) return connection_.ended();
  Status status = group.usable_in(group.epoch);
  if (!status.ok()) return status;
  if (const InFlight* op = group.slot_busy(request.slot); op != nullptr) {
    return connection_.blocked(lock, "slot " + std::to_string(request.slot) + " has ticket " +
                                         std::to_string(op->ticket) + " in flight");
  }
  return {};
}

// One operation at a time writes a routing, and none reads it meanwhile.
Status SubmittedOperations::choose_route(Lock& lock, Group& group, const SubmitRequest& request,
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
  if (group.route_busy(use.route, use.writes)) take_news_locked();
  if (!group.route_busy(use.route, use.writes)) return {};
  return connection_.blocked(
      lock,
      use.writes
          ? "an operation in flight on another slot uses the routing of slot " + std::to_string(request.slot)
          : "the dispatch of handle " + std::to_string(request.handle) + " is in flight on another slot");
}

Status SubmittedOperations::no_room(Lock& lock) {
  std::string full;
  Status status = ring_.check(full);
  if (!status.ok()) return status;
  take_news_locked();  // an engine without room for completions takes no submissions
  return connection_.blocked(lock, std::move(full));
}

Status SubmittedOperations::admit(Lock& lock, Group& group, const SubmitRequest& request, RouteUse& use) {
  Status status = ready_to_submit(lock, group, request);
  if (!status.ok()) return status;
  use = {};
  status = choose_route(lock, group, request, use);
  if (!status.ok()) return status;
  return ring_.has_room() ? Status() : no_room(lock);
}

Status SubmittedOperations::push(Lock& lock, Group& group, const SubmitRequest& request, const RouteUse& use,
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
  group.in_flight.push_back({ticket, request.slot, use.route, use.writes});
  const std::uint32_t timeout_ms = request.timeout_ms != 0 ? request.timeout_ms : group.default_timeout_ms;
  op.answer_by = now + std::chrono::milliseconds(timeout_ms) + kAnswerGrace;
  if (!ring_.push(submission)) {
    completions_.retire(ticket);
    group.in_flight.pop_back();
    return no_room(lock);  // there was room before, so the engine's index is wrong
  }
  if (request.op != abi::Op::kNoop) ++group.next_index;
  return {};
}

void SubmittedOperations::note_copies(Group& group, const SubmitRequest& request,
                                      const stream_kernels::Copies& copies, epd_ticket_t ticket) {
  if (!copies.any()) return;
  Operation& op = *completions_.find(ticket);
  op.room = request.op == abi::Op::kDispatch ? room_for_rows(copies) : 0;
  op.has_outputs = true;
  group.ended_well[request.slot] = 0;
  group.outputs[request.slot] = {ticket, copies};
}

// The slot is free: its last operation has ended. Copies without the session's mutex.
void SubmittedOperations::copy_by_host(Lock& lock, Group& group, std::uint32_t slot,
                                       const stream_kernels::Copies& copies) {
  lock.unlock();
  copy_outputs(group, slot);
  group.outputs[slot].ticket = 0;
  copy_in(copies);
  lock.lock();
}

Status SubmittedOperations::submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                                   epd_handle_t* handle) {
  Status status = check_request(group, request);
  if (status.ok()) status = check_stream(request.stream);
  if (status.ok() && request.num_tokens_at != nullptr)
    status = invalid_argument("num_tokens_at is given; allowed: NULL, but on GPUs");
  if (!status.ok()) return status;
  std::optional<stream_kernels::Copies> planned;  // 600 bytes, so made only for the caller's own memory
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
  if (copies.any() || group.outputs[request.slot].ticket != 0) {
    copy_by_host(lock, group, request.slot, copies);
    // Meanwhile the session may have ended, the group broken, or other groups filled the ring.
    status = admit(lock, group, request, use);
  }
  if (!status.ok()) return status;
  const epd_handle_t made = use.writes ? make_handle(group.next_index, use.route) : request.handle;
  const epd_ticket_t number = ++last_ticket_;
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
  lock.unlock();
  ring_.wake_engine(abi::kAsleep);
  return {};
}

}  // namespace epd::client
