#include "steps.h"

#include "proto/arena.h"

#include <algorithm>
#include <utility>

namespace epd::membership {

// ---- members

void Members::stop(const Group& group, Member& member) {
  if (std::holds_alternative<Member::Stopping>(member.calls)) return;
  const auto* stopped = std::get_if<Member::Stopped>(&member.calls);
  const auto* failing = std::get_if<Group::Failing>(&group.state);
  const auto found = group.engines.find(member.engine);
  const EnginePhase engine = found != group.engines.end() ? found->second.phase() : EnginePhase::kAbsent;
  if (stopped != nullptr) {
    has_stopped(member, stopped->next_submit);
  } else if (engine == EnginePhase::kDone || engine == EnginePhase::kAbsent) {
    // Nobody knows any more what its old engine had taken and not completed.
    has_stopped(member, member.board_index);
  } else if (!member.announced || (failing != nullptr && failing->told && engine == EnginePhase::kBroken)) {
    has_stopped(member, kNever);  // it has submitted nothing, or everything has failed there already
  } else {
    member.calls = Member::Stopping{desk_.due_in_ms(desk_.limits().engine_ack_ms)};
    desk_.emit(SendStopMember{member.engine, {group.id, member.rank, 0, 0}});
  }
}

void Members::has_stopped(Member& member, std::uint64_t next_submit) {
  if (!std::holds_alternative<Member::Stopped>(member.calls)) member.calls = Member::Stopped{next_submit};
  if (!member.leave_request) return;
  desk_.answer(ReplyLeft{{member.session, *member.leave_request}, {member.member, 0}});
  member.leave_request.reset();
}

namespace {

bool shares_device(const Group& group, const Member& member) {
  return std::any_of(group.members.begin(), group.members.end(), [&](const auto& entry) {
    return entry.second.rank != member.rank && entry.second.engine == member.engine;
  });
}

}  // namespace

void Members::reply_joined(const Group& group, const Member& member) {
  const std::uint64_t arena_bytes = abi::UserArenaLayout(group.shape).total_bytes;
  const std::uint64_t board_bytes = sizeof(abi::Board);
  desk_.answer(ReplyJoined{
      member.join_id(),
      {member.member, member.rank, group.id, group.epoch, group.resume_index, arena_bytes, board_bytes,
       desk_.limits().operation_ms, group.shape.sum_ranks, shares_device(group, member) ? 1u : 0u, 0},
      group.label()});
}

void Members::release_memory(const Group& group, Member& member) {
  if (!std::exchange(member.holds_memory, false)) return;
  if (!member.evicted.empty()) tell_evicted(group, member);
  desk_.emit(ReleaseMemory{member.engine, group.id, member.rank});
}

// The session of an evicted rank continues, so the board must say that no engine will serve the rank.
void Members::tell_evicted(const Group& group, const Member& member) {
  desk_.emit(MarkLost{member.engine, group.id, member.rank, StatusCode::kRankLost,
                      static_cast<std::int32_t>(member.rank), member.evicted});
  desk_.emit(WakeSession{member.session});
  if (group.device_kind == abi::DeviceKind::kCuda && !nodes_.is_up(member.engine))
    desk_.emit(CloseStreams{member.engine, group.id, member.rank, true});
}

void Members::end(const Group& group, Member& member) {
  release_memory(group, member);
  if (member.leave_request) has_stopped(member, 0);
  memberships_.free(member.session, member.member);
}

// A node that has still to make the memory makes it first and then releases it.
void Members::drop(const Group& group, const Arrival& arrival) {
  desk_.emit(ReleaseMemory{arrival.member.engine, group.id, arrival.member.rank});
  memberships_.free(arrival.member.session, arrival.member.member);
}

// ---- steps

void Steps::start(Group& group, EngineId engine) {
  EngineSlot& slot = group.engines.at(engine);
  if (!nodes_.is_up(engine)) {
    slot.state = EngineSlot::Absent{};
    return;
  }
  slot.state = EngineSlot::Starting{desk_.due_in_ms(desk_.limits().engine_start_ms)};
  slot.waits_for.clear();
  for (auto& [rank, member] : group.members) {
    if (member.engine == engine && !member.gone()) member.announced = true;
  }
  desk_.emit(StartGroup{engine, describe_to(group, engine), group.is(GroupPhase::kBreaking)});
}

GroupDescription Steps::describe_to(const Group& group, EngineId engine) const {
  GroupDescription description = group.describe();
  description.settings = group.settings_on(engine);
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank)
    description.ranks.push_back(group.describe(rank));
  for (const auto& [rank, member] : group.members) {
    if (member.engine == engine && member.announced) description.members.push_back(describe(member));
  }
  for (const auto& [other, slot] : group.engines) {
    if (other.node != engine.node && group.needs(other))
      description.far_engines.push_back(nodes_.describe(other));
  }
  return description;
}

void Steps::send_break(Group& group, EngineId engine) {
  const auto* failing = std::get_if<Group::Failing>(&group.state);
  abi::Break message{};
  message.group_id = group.id;
  message.epoch = group.epoch;
  message.fail_from = failing != nullptr ? failing->fail_from : 0;
  message.fatal = failing != nullptr ? 1 : 0;
  message.cause = group.reason.cause;
  message.failed_rank = group.reason.failed_rank;
  abi::set_text(message.text, group.reason.text.data(), group.reason.text.size());
  // Before a fatal break is over, operations that began run to their end.
  const MembershipLimits& limits = desk_.limits();
  const std::uint64_t patience_ms = message.fail_from != 0 ? limits.operation_ms : 0;
  group.engines.at(engine).state =
      EngineSlot::Breaking{desk_.due_in_ms(limits.engine_ack_ms + patience_ms), message.fatal != 0};
  desk_.emit(SendBreak{engine, message, group.label(), group.reason.orderly});
}

void Steps::resume(Group& group, bool reason_changed) {
  const abi::Resume message{group.id, group.epoch, group.resume_index, StatusCode::kOk,
                            -1,       {},          group.view,         {}};
  abi::Resume reason = message;
  reason.cause = group.reason.cause;
  reason.failed_rank = group.reason.failed_rank;
  abi::set_text(reason.text, group.reason.text.data(), group.reason.text.size());
  for (auto& [engine, slot] : group.engines) {
    if (!slot.is(EnginePhase::kBroken)) continue;
    const bool tell = reason_changed || std::get<EngineSlot::Broken>(slot.state).restarted;
    slot.waits_for.clear();
    const bool all = group.device_kind == abi::DeviceKind::kCuda;  // see Engines::resumed()
    const bool awaited =
        std::any_of(group.members.begin(), group.members.end(), [&, e = engine](const auto& entry) {
          return (all || entry.second.engine == e) && entry.second.presence == Presence::kJoining;
        });
    slot.state = EngineSlot::Serving{awaited ? desk_.due_in_ms(desk_.limits().engine_ack_ms) : 0};
    desk_.emit(SendResume{engine, tell ? reason : message, group.label(), group.epoch_key});
  }
}

void Steps::send_changes(Group& group, const std::set<std::uint32_t>& changed) {
  for (auto& [engine, slot] : group.engines) {
    if (!slot.is(EnginePhase::kBroken)) continue;
    if (!group.needs(engine)) {
      send_removal(group, engine);
      continue;
    }
    for (const std::uint32_t rank : changed) {
      RankDescription description = group.describe(rank);
      if (!group.lives(rank)) {
        description.active_since = 0;
      } else {
        introduce(description.engine, engine);
      }
      desk_.emit(SendRank{engine, group.id, description});
    }
  }
}

void Steps::introduce(EngineId engine, EngineId to) {
  const FarEngine far = nodes_.describe(engine);
  if (engine.node != to.node && !far.address.empty()) desk_.emit(SendFarEngine{to, far});
}

void Steps::introduce(const Group& group, EngineId engine, std::set<EngineId>& told) {
  for (const auto& [other, slot] : group.engines) {
    if (slot.is(EnginePhase::kAbsent) || slot.is(EnginePhase::kDone)) continue;
    if (other != engine && group.needs(other) && told.insert(other).second) introduce(engine, other);
  }
}

void Steps::release_failed(Group& group) {
  for (auto& [engine, slot] : group.engines) {
    auto* broken = std::get_if<EngineSlot::Broken>(&slot.state);
    if (broken == nullptr || std::exchange(broken->released, true)) continue;
    desk_.emit(SendRelease{engine, {group.id}});
  }
}

void Steps::send_removal(Group& group, EngineId engine) {
  group.engines.at(engine).state = EngineSlot::Removing{desk_.due_in_ms(desk_.limits().engine_ack_ms)};
  desk_.emit(SendRemoveGroup{engine, {group.id}});
}

bool Steps::send_removals(Group& group) {
  bool any = false;
  for (auto& [engine, slot] : group.engines) {
    if (slot.is(EnginePhase::kAbsent) || slot.is(EnginePhase::kDone)) {
      slot.state = EngineSlot::Done{};
      continue;
    }
    any = true;
    if (!slot.is(EnginePhase::kRemoving)) send_removal(group, engine);
  }
  return any;
}

// The engine is not told of a group that ended, or a rank that was lost, while it was down. Streams that wait
// there would wait for ever: a client that waits for a stream does not look at its board.
void Steps::close_streams(const Group& group, EngineId engine) {
  const bool over = group.is(GroupPhase::kFailing) || group.is(GroupPhase::kLost);
  if (group.device_kind != abi::DeviceKind::kCuda || (!over && !group.is(GroupPhase::kBreaking))) return;
  for (const auto& [rank, member] : group.members) {
    if (member.engine == engine && member.holds_memory && (over || member.gone()))
      desk_.emit(CloseStreams{engine, group.id, rank});
  }
}

void Steps::mark_lost(const Group& group, EngineId engine) {
  for (const auto& [rank, member] : group.members) {
    if (member.engine != engine || !member.holds_memory) continue;
    desk_.emit(
        MarkLost{engine, group.id, rank, group.reason.cause, group.reason.failed_rank, group.reason.text});
    if (!member.gone()) desk_.emit(WakeSession{member.session});
  }
}

}  // namespace epd::membership
