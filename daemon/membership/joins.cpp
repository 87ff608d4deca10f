#include "joins.h"

#include "membership/join_rules.h"

#include <algorithm>
#include <utility>

namespace epd::membership {

void Joins::join(JoinRequest request) {
  Status status = check_alone(request);
  // On one node all ranks are in one sum domain, unless the group says otherwise.
  abi::GroupShape& shape = request.join.shape;
  if (shape.sum_ranks == 0 && !desk_.spans()) shape.sum_ranks = shape.num_ranks;
  if (request.join.restores != 0) {
    if (status.ok()) status = restore(request);
    if (!status.ok()) desk_.refuse(request.id, std::move(status));
    return;
  }
  const Group* group = status.ok() ? groups_.find_named({request.uid, request.join.group}) : nullptr;
  if (group != nullptr) {
    status = in_the_way(*group, request);
    if (!status.ok() && put_aside(request)) return;
  }
  if (status.ok()) status = try_join(request);
  if (!status.ok()) refuse(request, std::move(status));
}

// The ranks that wait for this one are told why it does not come.
void Joins::refuse(const JoinRequest& request, Status status) {
  Group* group = groups_.find_named({request.uid, request.join.group});
  if (group != nullptr && group->is(GroupPhase::kForming)) {
    const std::string who = request.join.rank < 0 ? "a rank" : "rank " + std::to_string(request.join.rank);
    group->refusal = "; " + who + " was refused: " + status.message();
  }
  desk_.refuse(request.id, std::move(status));
}

// Whoever else is there.
Status Joins::check_alone(const JoinRequest& request) const {
  if (Status status = check_join(request.join, request.num_memories); !status.ok()) return status;
  if (Status status = check_span(request.join.shape.span, desk_.spans()); !status.ok()) return status;
  return check_device(request.device_kind, request.join.shape);
}

// Why it can't join as long as these are there.
Status Joins::in_the_way(const Group& group, const JoinRequest& request) const {
  abi::GroupShape shape = request.join.shape;
  if (shape.sum_ranks == group.asked_sum_ranks) shape.sum_ranks = group.shape.sum_ranks;
  Status status = check_same_shape(group.shape, shape, group.name);
  if (status.ok()) status = check_same_kind(group.device_kind, request.device_kind, group.name);
  if (!status.ok()) return status;
  // A lost rank's place is free before its engine has let go of it.
  const std::int32_t wanted = request.join.rank;
  const bool lost =
      wanted < 0 ? group.num_lost() != 0 : group.holder(static_cast<std::uint32_t>(wanted)) == nullptr;
  return group.takes_ranks_back() && lost ? Status() : arrivals_.pick_rank(group, wanted).status();
}

// A rank of a group that runs asks that late ranks come back to it, or is one of them.
Status Joins::restore(const JoinRequest& request) {
  Group* group = groups_.find(request.join.restores);
  if (group == nullptr || group->uid != request.uid || !group->takes_ranks_back())
    return {StatusCode::kRankLost, "the group has ended; allowed: to leave it"};
  if (group->name != request.join.group) {  // access was judged by the name
    return {StatusCode::kInvalidArgument, "group is \"" + std::string(request.join.group) +
                                              "\", and the group to come back to \"" + group->name +
                                              "\"; allowed: the same"};
  }
  Status status = check_same_shape(group->shape, request.join.shape, group->name);
  if (status.ok()) status = check_same_kind(group->device_kind, request.device_kind, group->name);
  return status.ok() ? rejoins_.restore(*group, request) : status;
}

// Nobody is in its way.
Status Joins::try_join(const JoinRequest& request) {
  Group* group = groups_.find_named({request.uid, request.join.group});
  if (group == nullptr) {
    Status status = groups_.check_quotas(request, desk_.limits().max_groups, desk_.spans());
    if (!status.ok()) return status;
    group = &groups_.add(request, desk_.now_ns());
  }
  return group->takes_ranks_back() ? rejoins_.join(*group, request) : forming_.join(*group, request);
}

void Joins::on(const MemoryAcquired& event) {
  Group* group = groups_.find(event.group_id);
  if (group == nullptr) return;
  if (group->is(GroupPhase::kForming)) {
    forming_.settle(*group, event);
  } else {
    rejoins_.settle(*group, event);
  }
}

// False: it is to be refused now.
bool Joins::put_aside(const JoinRequest& request) {
  const auto of_session = of_session_.find(request.id.session);
  const std::uint32_t most_ms = desk_.limits().conflict_ms;
  if (most_ms == 0 || (of_session != of_session_.end() && of_session->second >= kMaxConflictsPerSession))
    return false;
  ++of_session_[request.id.session];
  const std::uint32_t timeout_ms = request.join.timeout_ms;
  const std::uint32_t wait_ms = timeout_ms == 0 ? most_ms : std::min(timeout_ms, most_ms);
  GroupConflicts& conflicts = conflicts_[{request.uid, request.join.group}];
  conflicts.joins.push_back({request, desk_.due_in_ms(wait_ms)});
  conflicts.due_ns = std::min(conflicts.due_ns, conflicts.joins.back().due_ns);
  return true;
}

void Joins::uncount(const JoinRequest& request) {
  const auto of_session = of_session_.find(request.id.session);
  if (--of_session->second == 0) of_session_.erase(of_session);
}

template <typename Test>
void Joins::erase_conflicts(const Test& test) {
  for (auto& [name, conflicts] : conflicts_) {
    std::erase_if(conflicts.joins, [&](const Conflict& conflict) {
      if (!test(conflict.request)) return false;
      uncount(conflict.request);
      return true;
    });
  }
  std::erase_if(conflicts_, [](const auto& entry) { return entry.second.joins.empty(); });
}

void Joins::sessions_closed(const EndedSessions& ended) {
  erase_conflicts([&ended](const JoinRequest& request) { return ended.contains(request.id.session); });
}

void Joins::on(const NodeDrains& event) {
  erase_conflicts([&](const JoinRequest& request) {
    if (request.id.session.node != event.node) return false;
    desk_.refuse(request.id, event.status);
    return true;
  });
}

void Joins::mark_conflicts(const Group& group) {
  const auto found = conflicts_.find({group.uid, group.name});
  if (found != conflicts_.end()) found->second.stale = true;
}

// Once for all sessions that have closed meanwhile, so that many of them cost the loop no more than one.
void Joins::tick() {
  for (auto& [name, conflicts] : conflicts_) retry(name, conflicts);
  std::erase_if(conflicts_, [](const auto& entry) { return entry.second.joins.empty(); });
}

void Joins::retry(const GroupName& name, GroupConflicts& conflicts) {
  if (!conflicts.stale && conflicts.due_ns > desk_.now_ns()) return;
  const bool stale = std::exchange(conflicts.stale, false);
  conflicts.due_ns = kNever;
  for (Conflict& conflict : std::exchange(conflicts.joins, {})) {
    const bool due = conflict.due_ns <= desk_.now_ns();
    const Group* group = stale || due ? groups_.find_named(name) : nullptr;
    Status status = group == nullptr ? Status() : in_the_way(*group, conflict.request);
    if (!due && (!stale || !status.ok())) {
      conflicts.due_ns = std::min(conflicts.due_ns, conflict.due_ns);
      conflicts.joins.push_back(std::move(conflict));
      continue;
    }
    uncount(conflict.request);
    if (status.ok()) status = try_join(conflict.request);
    if (!status.ok()) refuse(conflict.request, std::move(status));
  }
}

std::uint64_t Joins::next_due_ns() const {
  std::uint64_t due = kNever;
  for (const auto& [name, conflicts] : conflicts_) {
    if (conflicts.stale) return 0;
    due = std::min(due, conflicts.due_ns);
  }
  return due;
}

}  // namespace epd::membership
