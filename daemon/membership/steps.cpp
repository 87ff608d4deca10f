#include "steps.h"

#include <algorithm>
#include <utility>

namespace epd::membership {

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

// Of a group that has ended without this engine, or of a rank that was lost without it. The engine is told of
// neither, and nobody else could let the streams go on that wait there: a client looks at no board while it
// waits for a stream.
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
