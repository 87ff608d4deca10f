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
  const std::vector<std::uint32_t> ranks = take_arrived(group);
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

std::vector<std::uint32_t> Rejoins::take_arrived(Group& group) {
  std::vector<std::uint32_t> ranks;
  for (auto& [rank, arrival] : group.arrivals) {
    if (!nodes_.is_up(arrival.member.engine)) continue;
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
  begin_break(group);
}

void Rejoins::expire(Group& group, const Status& status) {
  std::erase_if(group.waiting, [&](const WaitingJoin& join) {
    if (join.due_ns > desk_.now_ns()) return false;
    desk_.refuse(join.request.id, status);
    return true;
  });
  arrivals_.expire(group, status);
  begin_break(group);
}

}  // namespace epd::membership
