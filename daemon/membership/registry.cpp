#include "membership/registry.h"

#include "membership/join_rules.h"

#include <algorithm>

namespace epd::membership {
namespace {

std::string rank_list(const std::vector<std::uint32_t>& ranks) {
  constexpr std::size_t kShown = 16;  // a message has room for so many and no more
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < kShown; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

std::vector<std::uint32_t> missing_ranks(const Group& group) {
  std::vector<std::uint32_t> missing;
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    if (group.members.count(rank) == 0) missing.push_back(rank);
  }
  return missing;
}

}  // namespace

std::vector<std::uint64_t> GroupRegistry::group_ids() const {
  std::vector<std::uint64_t> ids;
  ids.reserve(groups_.size());
  for (const auto& [id, group] : groups_) ids.push_back(id);
  return ids;
}

Group* GroupRegistry::find_named(std::uint32_t uid, const std::string& name) {
  const auto found = names_.find({uid, name});
  return found == names_.end() ? nullptr : &groups_.at(found->second);
}

void GroupRegistry::join(const JoinRequest& request) {
  Status status = check_alone(request);
  const std::string name(request.join.group);
  const Group* group = status.ok() ? find_named(request.uid, name) : nullptr;
  if (group != nullptr) {
    status = in_the_way(*group, request);
    if (!status.ok() && put_aside(request, name)) return;
  }
  if (status.ok()) status = try_join(request);
  if (!status.ok()) emit(ReplyRefused{request.session_id, request.request_id, std::move(status)});
}

// Whoever else is there.
Status GroupRegistry::check_alone(const JoinRequest& request) const {
  const std::size_t memories = request.memory == nullptr ? 0 : request.memory->size();
  if (Status status = check_join(request.join, memories); !status.ok()) return status;
  return check_device(request.device_kind, request.join.shape);
}

Status GroupRegistry::check_group_quotas(const JoinRequest& request) const {
  if (groups_.size() >= limits_.max_groups) {
    return resource_exhausted("there are " + std::to_string(groups_.size()) + " groups; allowed: " +
                              std::to_string(limits_.max_groups) + " (limits.max_groups)");
  }
  const auto of_user = static_cast<std::uint64_t>(std::count_if(
      groups_.begin(), groups_.end(), [&](const auto& entry) { return entry.second.uid == request.uid; }));
  if (of_user < request.quotas.groups.limit) return {};
  return over_quota(request.uid, of_user, "groups", request.quotas.groups);
}

// Nobody is in its way.
Status GroupRegistry::try_join(const JoinRequest& request) {
  const std::string name(request.join.group);
  Group* group = find_named(request.uid, name);
  const bool first = group == nullptr;
  if (first) {
    if (Status status = check_group_quotas(request); !status.ok()) return status;
    const std::uint64_t id = next_group_id_++;
    group = &groups_[id];
    group->id = id;
    group->uid = request.uid;
    group->name = name;
    group->shape = request.join.shape;
    group->device_kind = request.device_kind;
    group->created_ns = clock_.now_ns();
    names_[{request.uid, name}] = id;
  }
  if (group->takes_ranks_back()) return rejoin(*group, request);
  Result<std::uint32_t> rank = pick_rank(*group, request.join.rank);
  Status status = rank.ok() ? add_member(*group, *rank, request) : rank.status();
  if (!status.ok()) {
    if (first) forget(group->id);
    return status;
  }
  if (group->members.size() == group->shape.num_ranks) start(*group);
  return {};
}

Result<std::uint32_t> GroupRegistry::pick_rank(const Group& group, std::int32_t wanted) const {
  const std::vector<std::uint32_t> missing = missing_ranks(group);
  if (wanted < 0) {
    if (!missing.empty()) return missing.front();
    return invalid_argument("group \"" + group.name + "\" already has its " +
                            std::to_string(group.shape.num_ranks) + " ranks; allowed: another name");
  }
  const auto taken = group.members.find(static_cast<std::uint32_t>(wanted));
  if (taken == group.members.end()) return static_cast<std::uint32_t>(wanted);
  return invalid_argument("rank " + std::to_string(wanted) + " of group \"" + group.name +
                          "\" is taken by session " + std::to_string(taken->second.session_id) + " (pid " +
                          std::to_string(taken->second.pid) +
                          "); free: " + (missing.empty() ? "none" : rank_list(missing)));
}

Status GroupRegistry::check_reach(const Group& group, const JoinRequest& request) const {
  for (const auto& [rank, member] : group.members) {
    if (member.gone()) continue;
    const Status status = memory_.check_reach(request.device, member.device);
    if (status.ok()) continue;
    return {status.code(), status.message() + ", and rank " + std::to_string(rank) + " of group \"" +
                               group.name + "\" is on the latter"};
  }
  return {};
}

Status GroupRegistry::add_member(Group& group, std::uint32_t rank, const JoinRequest& request) {
  if (Status status = check_reach(group, request); !status.ok()) return status;
  std::vector<MemberPlace>& places = sessions_[request.session_id];
  auto place =
      std::find_if(places.begin(), places.end(), [](const MemberPlace& p) { return p.group_id == 0; });
  if (place == places.end() && places.size() >= kMaxMembershipsPerSession) {
    return resource_exhausted("session " + std::to_string(request.session_id) + " is in " +
                              std::to_string(places.size()) +
                              " groups; allowed: " + std::to_string(kMaxMembershipsPerSession));
  }
  Status status = memory_.acquire({group.id, rank, request.uid, request.device}, request.quotas, group.shape,
                                  request.join.bindings, request.memory);
  if (!status.ok()) return status;
  if (place == places.end()) place = places.emplace(places.end());
  place->generation = place->generation % 0xffffu + 1;
  place->group_id = group.id;
  place->rank = rank;

  Member member;
  member.session_id = request.session_id;
  member.rank = rank;
  member.member = make_member_id(static_cast<std::uint32_t>(place - places.begin()), place->generation);
  member.uid = request.uid;
  member.pid = request.pid;
  member.device = request.device;
  member.sms = request.join.sms;
  member.priority = request.join.priority;
  member.bound = abi::bound_regions(request.join.bindings);
  member.join_request = request.request_id;
  member.join_due_ns =
      due_in_ms(request.join.timeout_ms != 0 ? request.join.timeout_ms : limits_.join_timeout_ms);
  member.holds_memory = true;
  group.members.emplace(rank, member);
  return {};
}

// Engines have as long as the first rank waits, and at least the time of an answer.
void GroupRegistry::start(Group& group) {
  std::uint64_t first_due_ns = kNever;
  for (const auto& [rank, member] : group.members) first_due_ns = std::min(first_due_ns, member.join_due_ns);
  group.state = Group::Starting{std::max(first_due_ns, due_in_ms(limits_.engine_ack_ms))};
  for (const auto& [rank, member] : group.members) group.engines[member.device];
  for (auto& [device, slot] : group.engines) tell_engine(group, device, slot);
}

// No client knows yet that it has joined, so nothing is in flight: engines can forget at once.
void GroupRegistry::abort_start(Group& group, const Status& status) {
  drop_name(group);
  group.reason = {status.code(), -1, status.message()};
  for (auto& [rank, member] : group.members) {
    if (!member.gone()) emit(ReplyRefused{member.session_id, member.join_request, status});
    member.presence = Presence::kGone;
  }
  send_removals(group);
}

void GroupRegistry::expire_join(Group& group) {
  const std::vector<std::uint32_t> missing = missing_ranks(group);
  const Status status(StatusCode::kDeadlineExceeded,
                      "group \"" + group.name + "\" has " + std::to_string(group.members.size()) + " of " +
                          std::to_string(group.shape.num_ranks) + " ranks; missing: " + rank_list(missing));
  for (const auto& [rank, member] : group.members)
    emit(ReplyRefused{member.session_id, member.join_request, status});
  forget(group.id);
}

void GroupRegistry::expire_start(Group& group) {
  std::vector<std::uint32_t> waiting;
  for (const auto& [rank, member] : group.members) {
    if (!group.engines.at(member.device).is(EnginePhase::kServing)) waiting.push_back(rank);
  }
  abort_start(group, Status(StatusCode::kDeadlineExceeded,
                            "group \"" + group.name +
                                "\" has all its ranks, but the engines of some have not begun to "
                                "serve it in time: ranks " +
                                rank_list(waiting) + group.waits()));
}

GroupRegistry::MemberPlace* GroupRegistry::place_of(std::uint64_t session_id, std::uint32_t member) {
  const auto session = sessions_.find(session_id);
  const std::uint32_t index = member_index(member);
  if (session == sessions_.end() || index >= session->second.size()) return nullptr;
  MemberPlace& place = session->second[index];
  if (place.group_id == 0 || make_member_id(index, place.generation) != member) return nullptr;
  return &place;
}

void GroupRegistry::leave(std::uint64_t session_id, std::uint32_t request_id, std::uint32_t member_id) {
  const MemberPlace* place = place_of(session_id, member_id);
  Group* group = place == nullptr ? nullptr : &groups_.at(place->group_id);
  if (group == nullptr || group->is(GroupPhase::kForming) || group->is(GroupPhase::kStarting) ||
      group->members.at(place->rank).presence != Presence::kHere) {
    emit(ReplyRefused{session_id, request_id,
                      not_found("member " + std::to_string(member_id) + " is not a membership of session " +
                                std::to_string(session_id) + "; allowed: the number that Joined gave")});
    return;
  }
  group->members.at(place->rank).leave_request = request_id;
  lose_member(place->group_id, place->rank, "left");
}

void GroupRegistry::session_closed(std::uint64_t session_id, const std::string& how) {
  for (auto& [id, group] : groups_) {
    std::erase_if(group.waiting,
                  [session_id](const WaitingJoin& join) { return join.request.session_id == session_id; });
  }
  forget_conflicts(session_id);
  const auto session = sessions_.find(session_id);
  if (session == sessions_.end()) return;
  const std::vector<MemberPlace> places = session->second;  // the original changes below
  for (const MemberPlace& place : places) {
    const auto group = groups_.find(place.group_id);
    if (place.group_id == 0 || group == groups_.end()) continue;
    // The session's places in one group may go together.
    const auto member = group->second.members.find(place.rank);
    if (member == group->second.members.end() || member->second.session_id != session_id) continue;
    member->second.leave_request.reset();  // nobody is there to be answered
    mark_conflicts(group->second);
    if (!member->second.gone()) lose_member(place.group_id, place.rank, how);
  }
  sessions_.erase(session_id);
}

void GroupRegistry::evict(std::uint64_t group_id, std::uint32_t rank, const std::string& how) {
  Group& group = groups_.at(group_id);
  Member& member = group.members.at(rank);
  const bool rejoins = member.presence == Presence::kJoining;
  if (!rejoins) member.evicted = "rank " + std::to_string(rank) + " " + how;
  if (rejoins || group.is(GroupPhase::kForming) || group.is(GroupPhase::kStarting)) {
    emit(ReplyRefused{member.session_id, member.join_request,
                      Status(StatusCode::kAborted, "rank " + std::to_string(rank) + " " + how)});
  }
  lose_member(group_id, rank, how);
}

void GroupRegistry::lose_member(std::uint64_t group_id, std::uint32_t rank, const std::string& how) {
  Group& group = groups_.at(group_id);
  Member& member = group.members.at(rank);
  member.presence = Presence::kGone;
  const std::string text = "rank " + std::to_string(rank) + " (session " + std::to_string(member.session_id) +
                           ", pid " + std::to_string(member.pid) + ") " + how;
  switch (group.phase()) {
    case GroupPhase::kForming:
      end_membership(group, member);
      group.members.erase(rank);
      if (group.members.empty()) forget(group_id);
      return;
    case GroupPhase::kStarting:
      abort_start(group, Status(StatusCode::kRankLost, text + " while the group started"));
      return;
    case GroupPhase::kActive:
    case GroupPhase::kBreaking: {
      const bool orderly = how == "left" || how == "detached";
      BreakReason reason{StatusCode::kRankLost, static_cast<std::int32_t>(rank), text, orderly};
      if (group.shape.policy == abi::LossPolicy::kDegrade && !group.all_gone()) {
        lose_rank(group, member, std::move(reason));
        return;
      }
      begin_failing(group, std::move(reason));
      [[fallthrough]];
    }
    case GroupPhase::kFailing:
      stop_member(group, member);
      advance(group);
      return;
    case GroupPhase::kLost:
      member_has_stopped(member, 0);
      release_memory(group, member);
      remove_if_empty(group);
      return;
    case GroupPhase::kRemoving: return;
  }
}

// A group that ends keeps no one from forming the next one under its name.
void GroupRegistry::drop_name(const Group& group) {
  const auto found = names_.find({group.uid, group.name});
  if (found != names_.end() && found->second == group.id) names_.erase(found);
}

void GroupRegistry::release_memory(Group& group, Member& member) {
  if (!std::exchange(member.holds_memory, false)) return;
  if (!member.evicted.empty()) tell_evicted(group, member);
  memory_.release(group.id, member.rank);
}

// Its session goes on, so nothing else would say that no engine will ever serve it here.
void GroupRegistry::tell_evicted(const Group& group, const Member& member) {
  memory_.mark_lost(group.id, member.rank, member.evicted, StatusCode::kRankLost,
                    static_cast<std::int32_t>(member.rank));
  emit(WakeSession{member.session_id});
  if (group.device_kind == abi::DeviceKind::kCuda && !is_up(member.device))
    memory_.close_streams_later(member.device, group.id, member.rank);
}

// Only when no engine knows the membership any more may its index be given out again.
void GroupRegistry::end_membership(Group& group, Member& member) {
  release_memory(group, member);
  if (member.leave_request) member_has_stopped(member, 0);
  if (MemberPlace* place = place_of(member.session_id, member.member)) place->group_id = 0;
}

void GroupRegistry::forget(std::uint64_t group_id) {
  Group& group = groups_.at(group_id);
  for (auto& [rank, member] : group.members) end_membership(group, member);
  drop_name(group);
  groups_.erase(group_id);
}

void GroupRegistry::tick() {
  retry_conflicts();
  const std::uint64_t now = clock_.now_ns();
  for (const std::uint64_t id : group_ids()) {
    const auto found = groups_.find(id);
    if (found == groups_.end()) continue;
    Group& group = found->second;
    const auto* starting = std::get_if<Group::Starting>(&group.state);
    if (group.is(GroupPhase::kForming)) {
      const bool expired = std::any_of(group.members.begin(), group.members.end(),
                                       [now](const auto& e) { return e.second.join_due_ns <= now; });
      if (expired) expire_join(group);
    } else if (starting != nullptr && starting->due_ns <= now) {
      expire_start(group);
    } else {
      tick_running(group);
    }
  }
}

// An engine that misses a deadline is killed. One that lives on is stopped, so nothing can be had from it.
void GroupRegistry::tick_running(Group& group) {
  const std::uint64_t now = clock_.now_ns();
  const auto overdue = [&](std::uint64_t* due) {
    if (due == nullptr || *due > now) return false;
    *due = due_in_ms(limits_.engine_ack_ms);
    return true;
  };
  const std::string of_group = " of group " + std::to_string(group.id) + " in time";
  for (auto& [device, slot] : group.engines) {
    if (!overdue(slot.due_ns())) continue;
    const auto* failing = std::get_if<Group::Failing>(&group.state);
    if (failing != nullptr && failing->told && failing->fail_from != 0) {
      fail_everything(group);
    } else {
      emit(KillEngine{device, "no answer to a step" + of_group});
    }
  }
  bool stopped = false;
  for (auto& [rank, member] : group.members) {
    auto* stopping = std::get_if<Member::Stopping>(&member.submissions);
    if (stopping == nullptr || !overdue(&stopping->due_ns)) continue;
    emit(KillEngine{member.device, "rank " + std::to_string(rank) + of_group + " not stopped"});
    if (!std::exchange(stopping->asked_again, true)) continue;
    member_has_stopped(member, 0);
    stopped = true;
  }
  const auto* breaking = std::get_if<Group::Breaking>(&group.state);
  if (breaking != nullptr && breaking->release_due_ns <= now) release_failed(group);
  const std::uint64_t id = group.id;
  if (stopped) advance(group);  // may forget it
  if (groups_.count(id) == 1) expire_rejoins(group);
}

std::uint64_t GroupRegistry::next_due_ns() const {
  std::uint64_t due = kNever;
  const auto consider = [&due](std::uint64_t candidate) { due = std::min(due, candidate); };
  for (const auto& [id, group] : groups_) {
    for (const auto& [rank, member] : group.members) {
      if (group.is(GroupPhase::kForming) || member.presence == Presence::kJoining)
        consider(member.join_due_ns);
      if (const auto* stopping = std::get_if<Member::Stopping>(&member.submissions))
        consider(stopping->due_ns);
    }
    for (const auto& [device, slot] : group.engines) {
      if (const std::uint64_t* answer = slot.due_ns()) consider(*answer);
    }
    if (const auto* starting = std::get_if<Group::Starting>(&group.state)) consider(starting->due_ns);
    for (const WaitingJoin& join : group.waiting) consider(join.due_ns);
    const auto* breaking = std::get_if<Group::Breaking>(&group.state);
    if (breaking != nullptr && breaking->release_due_ns > clock_.now_ns()) consider(breaking->release_due_ns);
  }
  return std::min(due, next_conflict_ns());
}

std::uint32_t GroupRegistry::memberships(std::uint64_t session_id) const {
  const auto session = sessions_.find(session_id);
  if (session == sessions_.end()) return 0;
  const auto present = [this](const MemberPlace& p) {
    return p.group_id != 0 && !groups_.at(p.group_id).members.at(p.rank).gone();
  };
  return static_cast<std::uint32_t>(std::count_if(session->second.begin(), session->second.end(), present));
}

}  // namespace epd::membership
