#include "departures.h"

#include <utility>
#include <vector>

namespace epd::membership {
namespace {

const char* were(const std::vector<std::uint32_t>& ranks) {
  return ranks.size() == 1 ? " was " : " were ";
}

}  // namespace

void Departures::on(const LeaveRequest& event) {
  const Memberships::Place* place = parts_.memberships.find(event.id.session, event.member);
  Group* group = place == nullptr ? nullptr : parts_.groups.find(place->group_id);
  const auto found =
      group == nullptr ? std::map<std::uint32_t, Member>::iterator{} : group->members.find(place->rank);
  if (group == nullptr || group->is(GroupPhase::kForming) || group->is(GroupPhase::kStarting) ||
      found == group->members.end() || found->second.presence != Presence::kHere) {
    for (auto& [id, other] : parts_.groups.all()) {
      if (!other.late.empty() && parts_.rejoins.forget_late(other, event.id.session, event.member)) break;
    }
    desk_.refuse(
        event.id,
        not_found("member " + std::to_string(event.member) + " is not a membership of session " +
                  parts_.nodes.in_words(event.id.session) + "; allowed: the number that Joined gave"));
    return;
  }
  found->second.leave_request = event.id.number;
  lose(*group, found->second, "left");
}

void Departures::on(const SessionClosed& event) {
  desk_.sessions_closed(event.session);
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

// Forgets the joins of these sessions that are still waiting.
void Departures::forget_waiting(const EndedSessions& ended) {
  parts_.joins.sessions_closed(ended);
  for (const std::uint64_t id : parts_.groups.ids()) forget_waiting(*parts_.groups.find(id), ended);
}

void Departures::forget_waiting(Group& group, const EndedSessions& ended) {
  if (group.is(GroupPhase::kForming)) {
    parts_.forming.sessions_closed(group, ended);
  } else {
    parts_.rejoins.sessions_closed(group, ended);
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

bool Departures::lose_late(const BreakRequested& event) {
  Group* group = parts_.breaks.asked(event);
  if (group == nullptr || group->shape.policy != abi::LossPolicy::kDegradeLate) return false;
  const BreakReason reason = Breaks::reason_of(*group, event.message);
  if (reason.cause != StatusCode::kDeadlineExceeded || reason.failed_rank < 0) return false;
  const auto rank = static_cast<std::uint32_t>(reason.failed_rank);
  if (!group->lives(rank)) return false;
  const std::string text = "rank " + std::to_string(rank) + " is late, and so lost: " + reason.text;
  const Member& member = group->members.at(rank);
  // A rank that has no answer to its join does not know its new number, so the old note stays.
  if (!desk_.spans() && member.presence == Presence::kHere)
    group->late[rank] = {member.session, member.member};
  put_out(*group, {rank}, Status(StatusCode::kAborted, text), text);
  return true;
}

void Departures::on(const RankRefused& event) {
  const abi::RankRefused& message = event.message;
  if (parts_.groups.find_slot(message.group_id, event.engine) == nullptr) return;
  Group& group = *parts_.groups.find(message.group_id);
  // An engine can refuse memory of its own node only.
  if (!group.lives(message.rank) || group.members.at(message.rank).engine.node != event.engine.node) return;
  const std::string rank = "rank " + std::to_string(message.rank);
  const std::string why(message.text, abi::text_length(message.text));
  const Status status(said_cause(message.status, StatusCode::kInternal), rank + ": " + why);
  if (group.is(GroupPhase::kStarting)) {
    parts_.forming.abort_start(group, status);
    return;
  }
  Member& member = group.members.at(message.rank);
  const bool joining = member.presence == Presence::kJoining;
  if (joining) {
    parts_.members.refuse_join(member, status);
  } else {
    member.evicted = rank + " can't be served: " + why;
  }
  if (!joining && group.device_kind == abi::DeviceKind::kCuda && member.engine == event.engine) {
    desk_.emit(CloseStreams{event.engine, group.id, message.rank});
  }
  lose(group, member, "can't be served: " + why);
}

void Departures::lose(Group& group, Member& member, const std::string& how) {
  const std::string text = "rank " + std::to_string(member.rank) + " (session " +
                           parts_.nodes.in_words(member.session) + ", pid " + std::to_string(member.pid) +
                           ") " + how;
  lose(group, {member.rank},
       {StatusCode::kRankLost, static_cast<std::int32_t>(member.rank), text, is_orderly(how)});
}

void Departures::lose(Group& group, const std::vector<std::uint32_t>& ranks, BreakReason reason) {
  for (const std::uint32_t rank : ranks) group.members.at(rank).presence = Presence::kGone;
  switch (group.phase()) {
    case GroupPhase::kForming: parts_.forming.lose(group, ranks); return;
    case GroupPhase::kStarting:
      parts_.forming.abort_start(group,
                                 Status(StatusCode::kRankLost, reason.text + " while the group started"));
      return;
    case GroupPhase::kActive:
    case GroupPhase::kBreaking:
      if (abi::degrades(group.shape.policy) && !group.all_gone()) {
        lose_some(group, ranks, std::move(reason));
        return;
      }
      parts_.breaks.fail(group, std::move(reason));
      [[fallthrough]];
    case GroupPhase::kFailing:
      for (const std::uint32_t rank : ranks) parts_.members.stop(group, group.members.at(rank));
      parts_.breaks.advance(group);
      return;
    case GroupPhase::kLost:
      for (const std::uint32_t rank : ranks) {
        parts_.members.has_stopped(group.members.at(rank), 0);
        parts_.members.release_memory(group, group.members.at(rank));
      }
      parts_.breaks.remove_if_empty(group);
      return;
    case GroupPhase::kRemoving: return;
  }
}

// kStopMember goes first: a stopped rank has no say in where the others resume.
void Departures::lose_some(Group& group, const std::vector<std::uint32_t>& ranks, BreakReason reason) {
  bool took_part = false;
  for (const std::uint32_t rank : ranks) {
    Member& member = group.members.at(rank);
    parts_.members.stop(group, member);
    took_part = took_part || member.active_since <= group.epoch;
    const auto slot = group.engines.find(member.engine);
    if (slot != group.engines.end() && slot->second.is(EnginePhase::kAbsent) && !group.needs(member.engine))
      group.engines.erase(slot);
  }
  if (group.is(GroupPhase::kActive)) {
    parts_.breaks.begin(group, std::move(reason), {ranks.begin(), ranks.end()});
    return;
  }
  auto& breaking = std::get<Group::Breaking>(group.state);
  breaking.changed.insert(ranks.begin(), ranks.end());
  if (took_part && group.reason.cause != StatusCode::kRankLost) {
    group.reason = std::move(reason);
    breaking.reason_changed = true;
  }
  parts_.breaks.advance(group);
}

// ---- nodes

void Departures::on(const NodeLost& event) {
  parts_.nodes.node_lost(event.node);
  desk_.node_lost(event.node);
  const EndedSessions ended = EndedSessions::of_node(event.node);
  desk_.sessions_closed(ended);
  parts_.joins.sessions_closed(ended);
  for (const std::uint64_t id : parts_.groups.ids())
    node_lost(*parts_.groups.find(id), event.node, event.text);
  parts_.memberships.forget(ended);
}

// Nobody knows how far the node's engines came.
void Departures::node_lost(Group& group, std::uint32_t node, const std::string& how) {
  const std::uint64_t id = group.id;
  const bool over =
      group.is(GroupPhase::kFailing) || group.is(GroupPhase::kLost) || group.is(GroupPhase::kRemoving);
  for (auto& [engine, slot] : group.engines) {
    if (engine.node != node) continue;
    slot = EngineSlot{};
    if (over) slot.state = EngineSlot::Done{};
  }
  std::vector<std::uint32_t> ranks;
  for (auto& [rank, member] : group.members) {
    if (member.engine.node != node) continue;
    member.leave_request.reset();
    member.announced = false;
    member.calls = Member::Stopped{0};
    if (!member.gone()) ranks.push_back(rank);
  }
  forget_waiting(group, EndedSessions::of_node(node));
  if (parts_.groups.find(id) == nullptr) return;
  parts_.joins.mark_conflicts(group);
  if (!ranks.empty()) {
    const std::string text =
        ranks_in_words(ranks) + were(ranks) + "lost: " + parts_.nodes.in_words(node) + " was lost: " + how;
    lose(group, ranks, {StatusCode::kRankLost, static_cast<std::int32_t>(ranks.front()), text});
  }
  if (parts_.groups.find(id) != nullptr) forget_engines(group, node);
}

// Forgets the node's engines, which no living rank needs.
void Departures::forget_engines(Group& group, std::uint32_t node) {
  if (group.is(GroupPhase::kActive) || group.is(GroupPhase::kBreaking))
    std::erase_if(group.engines, [node](const auto& entry) { return entry.first.node == node; });
  if (group.is(GroupPhase::kRemoving)) {
    parts_.breaks.forget_if_removed(group);
  } else {
    parts_.breaks.advance(group);
  }
}

void Departures::put_out(Group& group, const std::set<std::uint32_t>& nodes, const std::string& how) {
  std::vector<std::uint32_t> ranks;
  for (const auto& [rank, member] : group.members) {
    if (nodes.contains(member.engine.node) && !member.gone()) ranks.push_back(rank);
  }
  if (ranks.empty()) return;
  std::string of;
  for (const std::uint32_t node : nodes) of += (of.empty() ? " of " : ", ") + parts_.nodes.in_words(node);
  const std::string text = ranks_in_words(ranks) + of + were(ranks) + "put out: " + how;
  put_out(group, ranks, Status(StatusCode::kAborted, text), text);
}

// `joining` is the answer to ranks that have not joined yet.
void Departures::put_out(Group& group, const std::vector<std::uint32_t>& ranks, const Status& joining,
                         const std::string& text) {
  for (const std::uint32_t rank : ranks) {
    Member& member = group.members.at(rank);
    if (member.presence == Presence::kJoining) {
      parts_.members.refuse_join(member, joining);
    } else {
      member.evicted = text;
    }
  }
  lose(group, ranks, {StatusCode::kRankLost, static_cast<std::int32_t>(ranks.front()), text});
}

// Nobody knows how far the engine's operations had come, so under fail fast nothing continues.
void Departures::cannot_serve(Group& group, EngineId engine, const Status& status) {
  std::vector<std::uint32_t> ranks;
  for (const auto& [rank, member] : group.members) {
    if (member.engine == engine && !member.gone()) ranks.push_back(rank);
  }
  if (ranks.empty()) {
    parts_.breaks.advance(group);
    return;
  }
  const std::string text =
      ranks_in_words(ranks) + were(ranks) + "lost: the engine can't serve the group: " + status.message();
  if (abi::degrades(group.shape.policy)) {
    put_out(group, ranks, status, text);
  } else {
    parts_.breaks.fail(group, {StatusCode::kRankLost, static_cast<std::int32_t>(ranks.front()), text}, 0);
    parts_.breaks.advance(group);
  }
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
