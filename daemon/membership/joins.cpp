#include "joins.h"

#include "membership/group.h"

#include <algorithm>
#include <string>
#include <utility>

namespace epd::membership {

// ---- rejoins

namespace {

// Sessions may wait for the same rank, and whoever comes first gets it; but each asks once.
Status check_not_asked_twice(const Group& group, const JoinRequest& request) {
  const std::size_t num_free = group.num_lost();
  const std::int32_t wanted = request.join.rank;
  const auto asked = std::count_if(group.waiting.begin(), group.waiting.end(), [&](const WaitingJoin& join) {
    return join.request.id.session == request.id.session && (wanted < 0 || join.request.join.rank == wanted);
  });
  if (static_cast<std::size_t>(asked) < (wanted < 0 ? num_free : 1)) return {};
  return invalid_argument("session " + to_string(request.id.session) + " waits for " +
                          (wanted < 0 ? std::to_string(asked) + " ranks" : "rank " + std::to_string(wanted)) +
                          " of group \"" + group.name + "\" already; allowed: to ask once for each of the " +
                          std::to_string(num_free) + " that are free");
}

}  // namespace

Status Rejoins::join(Group& group, const JoinRequest& request) {
  if (Status status = check_not_asked_twice(group, request); !status.ok()) return status;
  group.waiting.push_back({request, desk_.join_due_ns(request.join.timeout_ms)});
  admit(group);
  return {};
}

Status Rejoins::restore(Group& group, const JoinRequest& request) {
  const auto rank = static_cast<std::uint32_t>(request.join.rank);
  const SessionId session = request.id.session;
  const auto late = group.late.find(rank);
  const Member* const holder = group.holder(rank);
  if (holder == nullptr && late != group.late.end() && late->second.session == session)
    return join(group, request);
  if (holder == nullptr || holder->session != session)
    return {StatusCode::kRankLost,
            "rank " + std::to_string(rank) + " of group \"" + group.name +
                "\" was not lost for being late, or has been taken; allowed: to leave"};
  if (group.asked.contains(rank) || group.arrivals.contains(rank))
    return invalid_argument("rank " + std::to_string(rank) +
                            " waits for the late ranks already; allowed: to ask once");
  if (!group.is(GroupPhase::kActive)) return {group.reason.cause, group.reason.text};
  group.asked.emplace(rank, WaitingJoin{request, desk_.join_due_ns(request.join.timeout_ms)});
  begin_break(group);
  return {};
}

bool Rejoins::is_any_late(const Group& group) {
  return std::any_of(group.late.begin(), group.late.end(),
                     [&group](const auto& entry) { return !group.members.contains(entry.first); });
}

Status Rejoins::check_all_ask(const Group& group) const {
  if (!is_any_late(group)) return {};
  std::vector<std::uint32_t> missing;
  for (const auto& [rank, member] : group.members) {
    if (!member.gone() && !group.asked.contains(rank)) missing.push_back(rank);
  }
  for (const auto& [rank, late] : group.late) {
    if (group.members.contains(rank)) continue;
    const auto arrival = group.arrivals.find(rank);
    const bool ready = arrival != group.arrivals.end() && arrival->second.member.holds_memory &&
                       nodes_.is_up(arrival->second.member.engine);
    if (!ready) missing.push_back(rank);
  }
  if (missing.empty()) return {};
  return {StatusCode::kDeadlineExceeded,
          "late ranks come back to group \"" + group.name +
              "\" when all ranks that live have asked for it; missing: " + rank_list(missing)};
}

// A join whose engine is down keeps waiting: the other ranks need not stop before it can be served.
void Rejoins::admit(Group& group) {
  if (!group.is(GroupPhase::kActive)) return;
  for (WaitingJoin& join : std::exchange(group.waiting, {})) {
    if (!nodes_.is_up(join.request.engine)) {
      group.waiting.push_back(std::move(join));
      continue;
    }
    Result<std::uint32_t> rank = arrivals_.pick_rank(group, join.request.join.rank);
    Status status = rank.ok() ? arrivals_.ask(group, *rank, join.request, join.due_ns) : rank.status();
    if (!status.ok()) desk_.refuse(join.request.id, std::move(status));
  }
  begin_break(group);
}

void Rejoins::settle(Group& group, const MemoryAcquired& event) {
  arrivals_.settle(group, event);
  begin_break(group);
}

// The group does not break before all the memory has come.
void Rejoins::begin_break(Group& group) {
  const bool asked = std::any_of(group.arrivals.begin(), group.arrivals.end(),
                                 [](const auto& entry) { return !entry.second.member.holds_memory; });
  if (!group.is(GroupPhase::kActive) || asked) return;
  const bool restores = !group.asked.empty() && check_all_ask(group).ok();
  const std::vector<std::uint32_t> ranks = take_arrived(group, restores);
  if (restores) answer_asked(group, ranks.empty() ? group.epoch : group.epoch + 1);
  if (ranks.empty()) return;
  const std::string text = ranks_in_words(ranks) + (ranks.size() == 1 ? " has" : " have") + " rejoined";
  // Engines that are new to the group are told of it as it breaks.
  std::vector<EngineId> new_engines;
  for (const std::uint32_t rank : ranks) {
    const EngineId engine = group.members.at(rank).engine;
    if (!group.engines.contains(engine)) new_engines.push_back(engine);
    group.engines[engine];
  }
  breaks_.begin(group, {StatusCode::kAborted, static_cast<std::int32_t>(ranks.front()), text},
                {ranks.begin(), ranks.end()});
  for (const EngineId engine : new_engines) steps_.start(group, engine);
}

// The answer does not wait for the break: the ranks wait for the new epoch by themselves.
void Rejoins::answer_asked(Group& group, std::uint64_t epoch) {
  abi::Joined message{};
  message.group_id = group.id;
  message.epoch = epoch;
  message.kept = 1;
  for (const auto& [rank, join] : std::exchange(group.asked, {}))
    desk_.answer(ReplyJoined{join.request.id, message, group.label()});
}

std::vector<std::uint32_t> Rejoins::take_arrived(Group& group, bool restores) {
  std::vector<std::uint32_t> ranks;
  for (auto& [rank, arrival] : group.arrivals) {
    if (!nodes_.is_up(arrival.member.engine)) continue;
    const bool was_late = arrival.request.join.restores != 0;
    if (was_late && !restores) continue;
    if (was_late) arrival.member.join_due_ns = kNever;  // it waited for the others, which have come
    arrival.member.presence = Presence::kJoining;
    arrival.member.active_since = group.epoch + 1;
    group.members.emplace(rank, std::move(arrival.member));
    ranks.push_back(rank);
  }
  for (const std::uint32_t rank : ranks) group.arrivals.erase(rank);
  return ranks;
}

void Rejoins::sessions_closed(Group& group, const EndedSessions& ended) {
  std::erase_if(group.waiting,
                [&ended](const WaitingJoin& join) { return ended.contains(join.request.id.session); });
  arrivals_.sessions_closed(group, ended);
  std::erase_if(group.late, [&ended](const auto& entry) { return ended.contains(entry.second.session); });
  std::erase_if(group.asked,
                [&ended](const auto& entry) { return ended.contains(entry.second.request.id.session); });
  begin_break(group);
}

bool Rejoins::forget_late(Group& group, SessionId session, std::uint32_t member) {
  const bool any = std::erase_if(group.late, [&](const auto& entry) {
    return entry.second.session == session && entry.second.member == member;
  });
  if (any) begin_break(group);
  return any;
}

void Rejoins::expire(Group& group, const Status& agreeing) {
  const bool restores = group.is(GroupPhase::kActive) && !(group.asked.empty() && group.late.empty());
  const Status missing = restores ? check_all_ask(group) : Status();
  const Status& status = missing.ok() ? agreeing : missing;
  std::erase_if(group.asked, [&](const auto& entry) {
    if (entry.second.due_ns > desk_.now_ns()) return false;
    desk_.refuse(entry.second.request.id, status);
    return true;
  });
  std::erase_if(group.waiting, [&](const WaitingJoin& join) {
    if (join.due_ns > desk_.now_ns()) return false;
    desk_.refuse(join.request.id, status);
    return true;
  });
  arrivals_.expire(group, status);
  begin_break(group);
}

// ---- joins

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

// Judges the join without regard to other ranks.
Status Joins::check_alone(const JoinRequest& request) const {
  if (Status status = check_join(request.join); !status.ok()) return status;
  if (Status status = check_span(request.join.shape.span, desk_.spans()); !status.ok()) return status;
  return check_device(request.device_kind, request.join.shape);
}

// Says why the group's present members make the join impossible; OK: they don't.
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

// For a join that no present member makes impossible.
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

// False: the join must be refused now.
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

// Joins are tried again once per tick, however many sessions have closed.
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
