#include "forming.h"

#include <algorithm>
#include <string>
#include <utility>

namespace epd::membership {

// ---- arrivals

std::string rank_list(const std::vector<std::uint32_t>& ranks) {
  constexpr std::size_t kShown = 16;  // a message has room for so many and no more
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < kShown; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

std::string ranks_in_words(const std::vector<std::uint32_t>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + rank_list(ranks);
}

std::vector<std::uint32_t> missing_ranks(const Group& group) {
  std::vector<std::uint32_t> missing;
  auto member = group.members.begin();
  auto arrival = group.arrivals.begin();
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    const bool is_member = member != group.members.end() && member->first == rank;
    const bool arrives = arrival != group.arrivals.end() && arrival->first == rank;
    if (is_member) ++member;
    if (arrives) ++arrival;
    if (!is_member && !arrives) missing.push_back(rank);
  }
  return missing;
}

Result<std::uint32_t> Arrivals::pick_rank(const Group& group, std::int32_t wanted) const {
  const auto rank = static_cast<std::uint32_t>(wanted);
  const auto arrival = wanted < 0 ? group.arrivals.end() : group.arrivals.find(rank);
  const auto taken = wanted < 0 ? group.members.end() : group.members.find(rank);
  if (wanted >= 0 && arrival == group.arrivals.end() && taken == group.members.end()) return rank;
  const std::vector<std::uint32_t> missing = missing_ranks(group);
  if (wanted < 0) {
    if (!missing.empty()) return missing.front();
    return invalid_argument("group \"" + group.name + "\" already has its " +
                            std::to_string(group.shape.num_ranks) + " ranks; allowed: another name");
  }
  const Member& holder = taken != group.members.end() ? taken->second : arrival->second.member;
  return invalid_argument("rank " + std::to_string(wanted) + " of group \"" + group.name +
                          "\" is taken by session " + nodes_.in_words(holder.session) + " (pid " +
                          std::to_string(holder.pid) +
                          "); free: " + (missing.empty() ? "none" : rank_list(missing)));
}

Status Arrivals::check_reach(const Group& group, const JoinRequest& request) const {
  if (Status status = nodes_.check_device(request.engine); !status.ok()) return status;
  if (desk_.spans()) {
    if (Status status = nodes_.check_network(request.engine); !status.ok()) return status;
  }
  const auto check = [&](const Member& other) -> Status {
    Status status = other.gone() ? Status() : nodes_.check_reach(request.engine, other.engine);
    if (status.ok()) return status;
    return {status.code(), status.message() + ", and rank " + std::to_string(other.rank) + " of group \"" +
                               group.name + "\" is on the latter"};
  };
  Status status;
  for (const auto& [rank, member] : group.members) {
    if (status.ok()) status = check(member);
  }
  for (const auto& [rank, arrival] : group.arrivals) {
    if (status.ok()) status = check(arrival.member);
  }
  return status;
}

Status Arrivals::ask(Group& group, std::uint32_t rank, const JoinRequest& request, std::uint64_t due_ns) {
  if (Status status = check_reach(group, request); !status.ok()) return status;
  Result<std::uint32_t> id = memberships_.take(request, group.id, rank);
  if (!id.ok()) return id.status();
  Member member;
  member.session = request.id.session;
  member.rank = rank;
  member.member = *id;
  member.uid = request.uid;
  member.pid = request.pid;
  member.engine = request.engine;
  member.sms = request.join.sms;
  member.priority = request.join.priority;
  member.join_request = request.id.number;
  member.join_due_ns = due_ns;
  if (member.session.node != group.sole_node) group.sole_node = 0;
  group.arrivals.emplace(rank, Arrival{request, std::move(member)});
  desk_.emit(AcquireMemory{request.engine, request.id, group.id, rank, request.uid, group.shape});
  return {};
}

bool Arrivals::settle(Group& group, const MemoryAcquired& event) {
  const auto found = group.arrivals.find(event.rank);
  if (found == group.arrivals.end() || found->second.request.id != event.request) return false;
  Member& member = found->second.member;
  if (event.status.ok()) {
    member.holds_memory = true;
    return true;
  }
  memberships_.free(member.session, member.member);
  group.arrivals.erase(found);
  desk_.refuse(event.request, event.status);
  return false;
}

void Arrivals::expire(Group& group, const Status& status) {
  std::erase_if(group.arrivals, [&](const auto& entry) {
    const Arrival& arrival = entry.second;
    if (arrival.member.join_due_ns > desk_.now_ns()) return false;
    members_.drop(group, arrival);
    desk_.refuse(arrival.request.id, status);
    return true;
  });
}

void Arrivals::sessions_closed(Group& group, const EndedSessions& ended) {
  std::erase_if(group.arrivals, [&](const auto& entry) {
    if (!ended.contains(entry.second.member.session)) return false;
    members_.drop(group, entry.second);
    return true;
  });
}

// ---- forming

namespace {

// If every run of consecutive ranks of one node has the same length, that length; else R.
std::uint32_t sum_ranks_by_node(const Group& group) {
  std::vector<std::uint32_t> runs;
  const Member* before = nullptr;
  for (const auto& [rank, member] : group.members) {
    if (before == nullptr || before->engine.node != member.engine.node) runs.push_back(0);
    ++runs.back();
    before = &member;
  }
  const bool equal =
      std::all_of(runs.begin(), runs.end(), [&runs](std::uint32_t run) { return run == runs.front(); });
  return equal ? runs.front() : group.shape.num_ranks;
}

}  // namespace

Status Forming::join(Group& group, const JoinRequest& request) {
  Result<std::uint32_t> rank = arrivals_.pick_rank(group, request.join.rank);
  Status status = rank.ok() ? arrivals_.ask(group, *rank, request, desk_.join_due_ns(request.join.timeout_ms))
                            : rank.status();
  forget_if_empty(group);
  return status;
}

void Forming::settle(Group& group, const MemoryAcquired& event) {
  if (arrivals_.settle(group, event)) {
    Arrival arrival = std::move(group.arrivals.extract(event.rank).mapped());
    group.members.emplace(event.rank, std::move(arrival.member));
    if (group.members.size() == group.shape.num_ranks) start(group);
  } else {
    forget_if_empty(group);
  }
}

void Forming::forget_if_empty(Group& group) {
  if (group.members.empty() && group.arrivals.empty()) breaks_.forget(group);
}

// Engines have as long as the first rank waits, and at least the time of an answer.
void Forming::start(Group& group) {
  std::uint64_t first_due_ns = kNever;
  for (const auto& [rank, member] : group.members) first_due_ns = std::min(first_due_ns, member.join_due_ns);
  group.state = Group::Starting{std::max(first_due_ns, desk_.due_in_ms(desk_.limits().engine_ack_ms))};
  for (const auto& [rank, member] : group.members) group.engines[member.engine];
  if (group.shape.sum_ranks == 0) group.shape.sum_ranks = sum_ranks_by_node(group);
  group.epoch_key = desk_.new_epoch_key();
  for (auto& [engine, slot] : group.engines) steps_.start(group, engine);
}

void Forming::engine_ready(Group& group) {
  const bool all = std::all_of(group.engines.begin(), group.engines.end(),
                               [](const auto& entry) { return entry.second.is(EnginePhase::kServing); });
  if (!all) return;
  group.state = Group::Active{};
  for (const auto& [rank, member] : group.members) members_.reply_joined(group, member);
}

// No client knows yet that it has joined, so nothing is in flight: engines can forget at once.
void Forming::abort_start(Group& group, const Status& status) {
  group.reason = {status.code(), -1, status.message()};
  for (auto& [rank, member] : group.members) {
    if (!member.gone()) members_.refuse_join(member, status);
    member.presence = Presence::kGone;
  }
  breaks_.remove(group);
}

void Forming::lose(Group& group, const std::vector<std::uint32_t>& ranks) {
  for (const std::uint32_t rank : ranks) {
    members_.end(group, group.members.at(rank));
    group.members.erase(rank);
  }
  forget_if_empty(group);
}

void Forming::sessions_closed(Group& group, const EndedSessions& ended) {
  arrivals_.sessions_closed(group, ended);
  forget_if_empty(group);
}

void Forming::tick(Group& group) {
  const std::uint64_t now = desk_.now_ns();
  if (const auto* starting = std::get_if<Group::Starting>(&group.state)) {
    if (starting->due_ns <= now) expire_start(group);
    return;
  }
  const bool expired = std::any_of(group.members.begin(), group.members.end(),
                                   [now](const auto& e) { return e.second.join_due_ns <= now; }) ||
                       std::any_of(group.arrivals.begin(), group.arrivals.end(),
                                   [now](const auto& e) { return e.second.member.join_due_ns <= now; });
  if (expired) expire_join(group);
}

void Forming::expire_join(Group& group) {
  std::string text = "group \"" + group.name + "\" has " + std::to_string(group.members.size()) + " of " +
                     std::to_string(group.shape.num_ranks) + " ranks";
  if (const auto missing = missing_ranks(group); !missing.empty()) text += "; missing: " + rank_list(missing);
  if (!group.arrivals.empty()) {
    std::vector<std::uint32_t> arriving;
    for (const auto& [rank, arrival] : group.arrivals) arriving.push_back(rank);
    text += "; still without their memory: " + rank_list(arriving);
  }
  const Status status(StatusCode::kDeadlineExceeded, text + group.refusal);
  for (const auto& [rank, member] : group.members) members_.refuse_join(member, status);
  for (const auto& [rank, arrival] : group.arrivals) members_.refuse_join(arrival.member, status);
  breaks_.forget(group);
}

void Forming::expire_start(Group& group) {
  std::vector<std::uint32_t> waiting;
  for (const auto& [rank, member] : group.members) {
    if (!group.engines.at(member.engine).is(EnginePhase::kServing)) waiting.push_back(rank);
  }
  abort_start(group, Status(StatusCode::kDeadlineExceeded,
                            "group \"" + group.name +
                                "\" has all its ranks, but the engines of some have not begun to "
                                "serve it in time: ranks " +
                                rank_list(waiting) + group.waits()));
}

}  // namespace epd::membership
