// What the parts of the registry share: the time, the limits, what has been decided, and which requests are
// owed an answer.
#pragma once

#include "base/clock.h"
#include "membership/actions.h"
#include "membership/limits.h"

#include <cstdint>
#include <set>
#include <utility>

namespace epd::membership {

class Desk {
 public:
  Desk(const Clock& clock, const MembershipLimits& limits) : clock_(clock), limits_(limits) {}

  std::uint64_t now_ns() const { return clock_.now_ns(); }
  std::uint64_t due_in_ms(std::uint64_t ms) const { return now_ns() + ms * 1'000'000; }
  // When a join that asks to wait for `timeout_ms` (0: the default) is refused.
  std::uint64_t join_due_ns(std::uint32_t timeout_ms) const {
    return due_in_ms(timeout_ms != 0 ? timeout_ms : limits_.join_timeout_ms);
  }
  const MembershipLimits& limits() const { return limits_; }
  void set_limits(const MembershipLimits& limits) { limits_ = limits; }

  template <typename T>
  void emit(T action) {
    actions_.emplace_back(std::move(action));
  }
  Actions take_actions() { return std::exchange(actions_, {}); }

  // False: its answer is owed already, so this is the same request, said again.
  bool expect(const RequestId& request) { return owed_.insert(request).second; }
  // Once for each request; nothing is said to a session that has closed.
  template <typename Reply>
  void answer(Reply reply) {
    if (owed_.erase(reply.request) == 1) emit(std::move(reply));
  }
  void refuse(const RequestId& request, Status status) { answer(ReplyRefused{request, std::move(status)}); }
  void session_closed(SessionId session) {
    std::erase_if(owed_, [session](const RequestId& request) { return request.session == session; });
  }

 private:
  const Clock& clock_;
  MembershipLimits limits_;
  Actions actions_;
  std::set<RequestId> owed_;
};

}  // namespace epd::membership
