// Joins that others are in the way of. Each connection is read by a thread of its own, so a process that
// takes the place of one that has ended may be heard of first: what is in its way is then a session that is
// about to close.
#include "membership/registry.h"

#include <algorithm>

namespace epd::membership {

// False: it is to be refused now.
bool GroupRegistry::put_aside(const JoinRequest& request, Status status) {
  const auto of_session =
      static_cast<std::size_t>(std::count_if(conflicts_.begin(), conflicts_.end(), [&](const Conflict& c) {
        return c.request.session_id == request.session_id;
      }));
  if (limits_.conflict_ms == 0 || of_session >= kMaxConflictsPerSession) return false;
  const std::uint32_t timeout_ms = request.join.timeout_ms;
  const std::uint32_t wait_ms =
      timeout_ms == 0 ? limits_.conflict_ms : std::min(timeout_ms, limits_.conflict_ms);
  conflicts_.push_back({request, std::move(status), due_in_ms(wait_ms)});
  return true;
}

// A session of the user has closed. Groups and quotas are each user's own.
void GroupRegistry::retry_conflicts(std::uint32_t uid) {
  for (Conflict& conflict : std::exchange(conflicts_, {})) {
    if (conflict.request.uid == uid) conflict.refusal = try_join(conflict.request);
    if (!conflict.refusal.ok()) conflicts_.push_back(std::move(conflict));
  }
}

// Memory is given back only when engines have let go of it, so each is tried once more.
void GroupRegistry::expire_conflicts() {
  const std::uint64_t now = clock_.now_ns();
  for (Conflict& conflict : std::exchange(conflicts_, {})) {
    if (conflict.due_ns > now) {
      conflicts_.push_back(std::move(conflict));
      continue;
    }
    Status status = try_join(conflict.request);
    if (!status.ok())
      emit(ReplyRefused{conflict.request.session_id, conflict.request.request_id, std::move(status)});
  }
}

}  // namespace epd::membership
