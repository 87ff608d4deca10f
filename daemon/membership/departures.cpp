#include "departures.h"

#include <utility>
#include <vector>

namespace epd::membership {

void Departures::on(const LeaveRequest& event) {
  const Memberships::Place* place = parts_.memberships.find(event.id.session, event.member);
  Group* group = place == nullptr ? nullptr : parts_.groups.find(place->group_id);
  const auto found =
      group == nullptr ? std::map<std::uint32_t, Member>::iterator{} : group->members.find(place->rank);
  if (group == nullptr || group->is(GroupPhase::kForming) || group->is(GroupPhase::kStarting) ||
      found == group->members.end() || found->second.presence != Presence::kHere) {
    desk_.refuse(event.id,
                 not_found("member " + std::to_string(event.member) + " is not a membership of session " +
                           to_string(event.id.session) + "; allowed: the number that Joined gave"));
    return;
  }
  found->second.leave_request = event.id.number;
  lose(*group, found->second, "left");
}

void Departures::on(const SessionClosed& event) {
  desk_.session_closed(event.session);
  forget_waiting(event.session);
  for (const Memberships::Place& place : parts_.memberships.of(event.session)) {
    // The session's places in one group may go together.
    Group* group = parts_.groups.find(place.group_id);
    if (group == nullptr) continue;
    const auto member = group->members.find(place.rank);
    if (member == group->members.end() || member->second.session != event.session) continue;
    member->second.leave_request.reset();  // nobody is there to be answered
    parts_.joins.mark_conflicts(*group);
    if (!member->second.gone()) lose(*group, member->second, event.how);
  }
  parts_.memberships.forget(event.session);
}

// What it waits for: groups that it has not joined yet.
void Departures::forget_waiting(SessionId session) {
  parts_.joins.session_closed(session);
  for (const std::uint64_t id : parts_.groups.ids()) {
    Group& group = *parts_.groups.find(id);
    if (group.is(GroupPhase::kForming)) {
      parts_.forming.session_closed(group, session);
    } else {
      parts_.rejoins.session_closed(group, session);
    }
  }
}

// Nothing happens if the rank has gone meanwhile.
void Departures::on(const EvictRank& event) {
  Group* group = parts_.groups.find(event.group_id);
  if (group == nullptr || !group->lives(event.rank)) return;
  Member& member = group->members.at(event.rank);
  const std::string text = "rank " + std::to_string(event.rank) + " " + event.how;
  const bool rejoins = member.presence == Presence::kJoining;
  if (!rejoins) member.evicted = text;
  if (rejoins || group->is(GroupPhase::kForming) || group->is(GroupPhase::kStarting))
    parts_.members.refuse_join(member, Status(StatusCode::kAborted, text));
  lose(*group, member, event.how);
}

void Departures::on(const RankRefused& event) {
  const abi::RankRefused& message = event.message;
  if (parts_.groups.find_slot(message.group_id, event.engine) == nullptr) return;
  Group& group = *parts_.groups.find(message.group_id);
  if (!group.lives(message.rank)) return;
  const Status status(message.status, "rank " + std::to_string(message.rank) + ": " +
                                          std::string(message.text, abi::text_length(message.text)));
  if (group.is(GroupPhase::kStarting)) {
    parts_.forming.abort_start(group, status);
    return;
  }
  Member& member = group.members.at(message.rank);
  if (member.presence == Presence::kJoining) {
    parts_.members.refuse_join(member, status);
  } else if (group.device_kind == abi::DeviceKind::kCuda && member.engine == event.engine) {
    desk_.emit(CloseStreams{event.engine, group.id, message.rank});
  }
  lose(group, member, "can't be served: " + status.message());
}

void Departures::lose(Group& group, Member& member, const std::string& how) {
  member.presence = Presence::kGone;
  const std::string text = "rank " + std::to_string(member.rank) + " (session " + to_string(member.session) +
                           ", pid " + std::to_string(member.pid) + ") " + how;
  switch (group.phase()) {
    case GroupPhase::kForming: parts_.forming.lose(group, member.rank); return;
    case GroupPhase::kStarting:
      parts_.forming.abort_start(group, Status(StatusCode::kRankLost, text + " while the group started"));
      return;
    case GroupPhase::kActive:
    case GroupPhase::kBreaking: {
      const bool orderly = how == "left" || how == "detached";
      BreakReason reason{StatusCode::kRankLost, static_cast<std::int32_t>(member.rank), text, orderly};
      if (group.shape.policy == abi::LossPolicy::kDegrade && !group.all_gone()) {
        lose_one_of_many(group, member, std::move(reason));
        return;
      }
      parts_.breaks.fail(group, std::move(reason));
      [[fallthrough]];
    }
    case GroupPhase::kFailing:
      parts_.members.stop(group, member);
      parts_.breaks.advance(group);
      return;
    case GroupPhase::kLost:
      parts_.members.has_stopped(member, 0);
      parts_.members.release_memory(group, member);
      parts_.breaks.remove_if_empty(group);
      return;
    case GroupPhase::kRemoving: return;
  }
}

// The rank's kStopMember goes first: a stopped rank has no say in where the others go on.
void Departures::lose_one_of_many(Group& group, Member& member, BreakReason reason) {
  parts_.members.stop(group, member);
  const auto slot = group.engines.find(member.engine);
  if (slot != group.engines.end() && slot->second.is(EnginePhase::kAbsent) && !group.needs(member.engine))
    group.engines.erase(slot);
  if (group.is(GroupPhase::kActive)) {
    parts_.breaks.begin(group, std::move(reason), {member.rank});
    return;
  }
  auto& breaking = std::get<Group::Breaking>(group.state);
  breaking.changed.insert(member.rank);
  const bool took_part = member.active_since <= group.epoch;
  if (took_part && group.reason.cause != StatusCode::kRankLost) {
    group.reason = std::move(reason);
    breaking.reason_changed = true;
  }
  parts_.breaks.advance(group);
}

void Departures::expire_rejoins(Group& group) {
  const std::uint64_t now = desk_.now_ns();
  const std::string waits = group.waits();
  const Status status(StatusCode::kDeadlineExceeded, "group \"" + group.name +
                                                         "\" is still agreeing on who takes part" +
                                                         (waits.empty() ? ": an engine is silent" : waits));
  std::vector<std::uint32_t> late;
  for (const auto& [rank, member] : group.members) {
    if (member.presence == Presence::kJoining && member.join_due_ns <= now) late.push_back(rank);
  }
  parts_.rejoins.expire(group, status);
  const std::uint64_t id = group.id;
  for (const std::uint32_t rank : late) {
    Member& member = group.members.at(rank);
    parts_.members.refuse_join(member, status);
    lose(group, member, "did not rejoin in time");
    if (parts_.groups.find(id) == nullptr || !group.takes_ranks_back()) return;
  }
}

}  // namespace epd::membership
