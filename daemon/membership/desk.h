// What the parts of the registry share: the time, the limits, what has been decided, and which requests are
// owed an answer.
#pragma once

#include "base/clock.h"
#include "membership/limits.h"
#include "membership/messages.h"

#include <cstdint>
#include <optional>
#include <set>
#include <utility>

namespace epd::membership {

class Desk {
 public:
  Desk(const Clock& clock, const MembershipLimits& limits, std::optional<Spanning> spanning)
      : clock_(clock), limits_(limits), spanning_(std::move(spanning)) {}

  std::uint64_t now_ns() const { return clock_.now_ns(); }
  std::uint64_t due_in_ms(std::uint64_t ms) const { return now_ns() + ms * 1'000'000; }
  // When a join that asks to wait for `timeout_ms` (0: the default) is refused.
  std::uint64_t join_due_ns(std::uint32_t timeout_ms) const {
    return due_in_ms(timeout_ms != 0 ? timeout_ms : limits_.join_timeout_ms);
  }
  const MembershipLimits& limits() const { return limits_; }
  void set_limits(const MembershipLimits& limits) { limits_ = limits; }
  // Whether the groups may have ranks on several nodes.
  bool spans() const { return spanning_.has_value(); }
  EpochKey new_epoch_key() const { return spans() ? spanning_->new_epoch_key() : EpochKey{}; }

  // Nothing is wanted of a node that is lost.
  template <typename T>
  void emit(T action) {
    Action whole(std::move(action));
    if (!lost_.contains(node_of(whole))) actions_.push_back(std::move(whole));
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
  void sessions_closed(const EndedSessions& ended) {
    std::erase_if(owed_, [&ended](const RequestId& request) { return ended.contains(request.session); });
  }
  // Numbers grow, so the lowest is the one that was lost long ago.
  void node_lost(std::uint32_t node) {
    lost_.insert(node);
    if (lost_.size() > kMaxLostNodes) lost_.erase(lost_.begin());
  }
  bool is_lost(std::uint32_t node) const { return lost_.contains(node); }

 private:
  const Clock& clock_;
  MembershipLimits limits_;
  const std::optional<Spanning> spanning_;
  std::set<std::uint32_t> lost_;
  Actions actions_;
  std::set<RequestId> owed_;
};

}  // namespace epd::membership
