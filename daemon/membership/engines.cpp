// Engines that come up, get ready, and die.
#include "membership/registry.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace epd::membership {

EngineSlot* GroupRegistry::slot_of(std::uint64_t group_id, std::uint32_t device) {
  const auto group = groups_.find(group_id);
  if (group == groups_.end()) return nullptr;
  const auto slot = group->second.engines.find(device);
  return slot == group->second.engines.end() ? nullptr : &slot->second;
}

void GroupRegistry::tell_engine(Group& group, std::uint32_t device, EngineSlot& slot) {
  if (!is_up(device)) {
    slot.phase = EnginePhase::kAbsent;
    return;
  }
  slot.phase = EnginePhase::kStarting;
  slot.waits_for.clear();
  slot.due_ns = due_in_ms(limits_.engine_start_ms);
  for (auto& [rank, member] : group.members) {
    if (member.device == device && !member.gone) member.announced = true;
  }
  emit(StartGroup{device, group.id, group.phase == GroupPhase::kBreaking});
}

void GroupRegistry::engine_up(std::uint32_t device) {
  if (up_.size() <= device) up_.resize(device + 1);
  up_[device] = true;
  for (auto& [id, group] : groups_) {
    if (group.phase == GroupPhase::kActive) admit_waiting(group);
    close_streams(group, device);
    if (group.phase != GroupPhase::kStarting && group.phase != GroupPhase::kBreaking) continue;
    const auto slot = group.engines.find(device);
    if (slot != group.engines.end() && slot->second.phase == EnginePhase::kAbsent)
      tell_engine(group, device, slot->second);
  }
}

// Of a group that has ended without this engine, or of a rank that was lost without it. The engine is told of
// neither, and nobody else could let the streams go on that wait there: a client looks at no board while it
// waits for a stream.
void GroupRegistry::close_streams(const Group& group, std::uint32_t device) {
  const bool over = group.phase == GroupPhase::kFailing || group.phase == GroupPhase::kLost;
  if (group.device_kind != abi::DeviceKind::kCuda || (!over && group.phase != GroupPhase::kBreaking)) return;
  for (const auto& [rank, member] : group.members) {
    if (member.device == device && member.holds_memory && (over || member.gone))
      emit(CloseStreams{device, group.id, rank});
  }
}

void GroupRegistry::engine_down(std::uint32_t device, const std::string& text) {
  if (is_up(device)) up_[device] = false;
  for (const std::uint64_t id : group_ids()) {
    if (slot_of(id, device) != nullptr) engine_down_for(groups_.at(id), device, text);
  }
}

void GroupRegistry::engine_down_for(Group& group, std::uint32_t device, const std::string& text) {
  EngineSlot& slot = group.engines.at(device);
  const bool over = group.phase == GroupPhase::kFailing || group.phase == GroupPhase::kLost ||
                    group.phase == GroupPhase::kRemoving;
  slot = EngineSlot{over ? EnginePhase::kDone : EnginePhase::kAbsent, 0, 0, false, ""};
  for (auto& [rank, member] : group.members) {
    if (member.device != device) continue;
    member.announced = false;
    const bool awaited = !member.next_submit && (member.gone || group.phase == GroupPhase::kFailing);
    if (awaited) member_has_stopped(member, memory_.next_index(group.id, rank));
  }
  switch (group.phase) {
    case GroupPhase::kForming:
    case GroupPhase::kStarting: return;
    case GroupPhase::kBreaking:
      if (!group.needs(device)) slot_free(group, device);
      return;
    case GroupPhase::kActive:
      if (group.needs(device)) {
        begin_break(group, {StatusCode::kEngineRestarted, -1, text});
      } else {
        slot_free(group, device);
      }
      return;
    case GroupPhase::kFailing:
      mark_members_lost(group, device);
      advance(group);
      return;
    case GroupPhase::kLost: mark_members_lost(group, device); return;
    case GroupPhase::kRemoving: {
      const bool all = std::all_of(group.engines.begin(), group.engines.end(), [](const auto& entry) {
        return entry.second.phase == EnginePhase::kDone;
      });
      if (all) forget(group.id);
      return;
    }
  }
}

void GroupRegistry::group_ready(std::uint32_t device, const abi::GroupReady& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  if (slot == nullptr || slot->phase != EnginePhase::kStarting) return;
  Group& group = groups_.at(message.group_id);
  slot->due_ns = 0;
  slot->waits_for.clear();
  const bool first_start = group.phase == GroupPhase::kStarting;
  if (message.status != StatusCode::kOk) {
    const std::string text(message.text, abi::text_length(message.text));
    slot->phase = EnginePhase::kBroken;
    if (first_start) {
      abort_start(group, Status(message.status, text));
      return;
    }
    if (group.phase == GroupPhase::kBreaking) begin_failing(group, {message.status, -1, text});
    group.fail_from = 0;
    advance(group);
    return;
  }
  if (!first_start) {
    slot->phase = EnginePhase::kBroken;
    slot->next_index = std::numeric_limits<std::uint64_t>::max();
    for (const auto& [rank, member] : group.members) {
      if (member.device == device && member.holds_memory && !member.gone && !member.joining)
        slot->next_index = std::min(slot->next_index, memory_.next_index(group.id, rank));
    }
    advance(group);
    return;
  }
  slot->phase = EnginePhase::kServing;
  const bool all = std::all_of(group.engines.begin(), group.engines.end(),
                               [](const auto& entry) { return entry.second.phase == EnginePhase::kServing; });
  if (!all) return;
  group.phase = GroupPhase::kActive;
  for (const auto& [rank, member] : group.members) reply_joined(group, member);
}

// Not a step that is late: nobody is to be killed for it. How long the others wait for it is bounded by their
// joins' deadlines.
void GroupRegistry::group_waits(std::uint32_t device, const abi::GroupWaits& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  const bool owes = slot != nullptr && slot->due_ns != 0 &&
                    (slot->phase == EnginePhase::kStarting || slot->phase == EnginePhase::kServing);
  if (!owes) return;
  slot->due_ns = due_in_ms(limits_.engine_start_ms);
  slot->waits_for.assign(message.text, abi::text_length(message.text));
}

void GroupRegistry::rank_refused(std::uint32_t device, const abi::RankRefused& message) {
  if (slot_of(message.group_id, device) == nullptr) return;
  Group& group = groups_.at(message.group_id);
  const auto found = group.members.find(message.rank);
  if (found == group.members.end() || found->second.gone) return;
  const Status status(message.status, "rank " + std::to_string(message.rank) + ": " +
                                          std::string(message.text, abi::text_length(message.text)));
  if (group.phase == GroupPhase::kStarting) {
    abort_start(group, status);
    return;
  }
  Member& member = found->second;
  if (std::exchange(member.joining, false)) {
    emit(ReplyRefused{member.session_id, member.join_request, status});
  } else if (group.device_kind == abi::DeviceKind::kCuda && member.device == device) {
    emit(CloseStreams{device, group.id, message.rank});
  }
  lose_member(group.id, message.rank, "can't be served: " + status.message());
}

void GroupRegistry::reply_joined(const Group& group, const Member& member) {
  const std::uint64_t arena_bytes = abi::UserArenaLayout(group.shape, member.bound).total_bytes;
  const std::uint64_t board_bytes = abi::BoardLayout(group.shape).total_bytes;
  emit(ReplyJoined{member.session_id,
                   member.join_request,
                   {member.member, member.rank, group.id, group.epoch, group.resume_index, arena_bytes,
                    board_bytes, limits_.operation_ms, 0}});
}

}  // namespace epd::membership
