#include "arrivals.h"

#include "proto/binding_rules.h"

#include <utility>

namespace epd::membership {

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
  member.bound = abi::bound_regions(request.join.bindings);
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

}  // namespace epd::membership
