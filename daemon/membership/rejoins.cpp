#include "rejoins.h"

#include <algorithm>
#include <string>
#include <utility>

namespace epd::membership {
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

// One whose engine is down waits on: the others need not stop for it before it can be served.
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

// Nobody is disturbed before the memory of all has come.
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

// They wait for the epoch by themselves, however long the break takes.
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

}  // namespace epd::membership
