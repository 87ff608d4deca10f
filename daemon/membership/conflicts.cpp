// Joins that members of their group are in the way of. Each connection is read by a thread of its own, so a
// process that takes the place of one that has ended may be heard of first: what is in its way is then a
// session that is about to close.
#include "membership/join_rules.h"
#include "membership/registry.h"

#include <algorithm>
#include <limits>

namespace epd::membership {

// Why it can't join as long as these are there.
Status GroupRegistry::in_the_way(const Group& group, const JoinRequest& request) const {
  Status status = check_same_shape(group.shape, request.join.shape, group.name);
  if (status.ok()) status = check_same_kind(group.device_kind, request.device_kind, group.name);
  if (!status.ok()) return status;
  // A lost rank's place is free before its engine has let go of it.
  const std::int32_t wanted = request.join.rank;
  const bool lost = wanted < 0 ? group.num_lost() != 0 : !group.lives(static_cast<std::uint32_t>(wanted));
  return group.takes_ranks_back() && lost ? Status() : pick_rank(group, wanted).status();
}

// False: it is to be refused now.
bool GroupRegistry::put_aside(const JoinRequest& request, const std::string& name) {
  std::size_t of_session = 0;
  for (const auto& [group, conflicts] : conflicts_) {
    of_session += static_cast<std::size_t>(
        std::count_if(conflicts.joins.begin(), conflicts.joins.end(),
                      [&](const Conflict& c) { return c.request.session_id == request.session_id; }));
  }
  if (limits_.conflict_ms == 0 || of_session >= kMaxConflictsPerSession) return false;
  const std::uint32_t timeout_ms = request.join.timeout_ms;
  const std::uint32_t wait_ms =
      timeout_ms == 0 ? limits_.conflict_ms : std::min(timeout_ms, limits_.conflict_ms);
  conflicts_[{request.uid, name}].joins.push_back({request, due_in_ms(wait_ms)});
  return true;
}

void GroupRegistry::forget_conflicts(std::uint64_t session_id) {
  for (auto& [name, conflicts] : conflicts_)
    std::erase_if(conflicts.joins, [&](const Conflict& c) { return c.request.session_id == session_id; });
  std::erase_if(conflicts_, [](const auto& entry) { return entry.second.joins.empty(); });
}

// One of its sessions closes.
void GroupRegistry::mark_conflicts(const Group& group) {
  const auto found = conflicts_.find({group.uid, group.name});
  if (found != conflicts_.end()) found->second.stale = true;
}

// Once for all sessions that have closed meanwhile, so that many of them cost the loop no more than one.
void GroupRegistry::retry_conflicts() {
  const std::uint64_t now = clock_.now_ns();
  for (auto& [name, conflicts] : conflicts_) {
    const bool stale = std::exchange(conflicts.stale, false);
    for (Conflict& conflict : std::exchange(conflicts.joins, {})) {
      const bool due = conflict.due_ns <= now;
      const Group* group = stale || due ? find_named(name.first, name.second) : nullptr;
      Status status = group == nullptr ? Status() : in_the_way(*group, conflict.request);
      if (!due && (!stale || !status.ok())) {
        conflicts.joins.push_back(std::move(conflict));
        continue;
      }
      if (status.ok()) status = try_join(conflict.request);
      if (!status.ok())
        emit(ReplyRefused{conflict.request.session_id, conflict.request.request_id, std::move(status)});
    }
  }
  std::erase_if(conflicts_, [](const auto& entry) { return entry.second.joins.empty(); });
}

void GroupRegistry::refuse_conflicts(const Status& status) {
  for (const auto& [name, conflicts] : std::exchange(conflicts_, {})) {
    for (const Conflict& conflict : conflicts.joins)
      emit(ReplyRefused{conflict.request.session_id, conflict.request.request_id, status});
  }
}

std::uint64_t GroupRegistry::next_conflict_ns() const {
  std::uint64_t due = std::numeric_limits<std::uint64_t>::max();
  for (const auto& [name, conflicts] : conflicts_) {
    if (conflicts.stale) return 0;
    for (const Conflict& conflict : conflicts.joins) due = std::min(due, conflict.due_ns);
  }
  return due;
}

}  // namespace epd::membership
