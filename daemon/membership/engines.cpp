// Engines that come up, get ready, and die.
#include "membership/registry.h"

#include <algorithm>
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
    slot.state = EngineSlot::Absent{};
    return;
  }
  slot.state = EngineSlot::Starting{due_in_ms(limits_.engine_start_ms)};
  slot.waits_for.clear();
  for (auto& [rank, member] : group.members) {
    if (member.device == device && !member.gone()) member.announced = true;
  }
  emit(StartGroup{device, group.id, group.is(GroupPhase::kBreaking)});
}

void GroupRegistry::engine_up(std::uint32_t device) {
  if (up_.size() <= device) up_.resize(device + 1);
  up_[device] = true;
  for (auto& [id, group] : groups_) {
    if (group.is(GroupPhase::kActive)) admit_waiting(group);
    close_streams(group, device);
    if (!group.is(GroupPhase::kStarting) && !group.is(GroupPhase::kBreaking)) continue;
    const auto slot = group.engines.find(device);
    if (slot != group.engines.end() && slot->second.is(EnginePhase::kAbsent))
      tell_engine(group, device, slot->second);
  }
}

// Of a group that has ended without this engine, or of a rank that was lost without it. The engine is told of
// neither, and nobody else could let the streams go on that wait there: a client looks at no board while it
// waits for a stream.
void GroupRegistry::close_streams(const Group& group, std::uint32_t device) {
  const bool over = group.is(GroupPhase::kFailing) || group.is(GroupPhase::kLost);
  if (group.device_kind != abi::DeviceKind::kCuda || (!over && !group.is(GroupPhase::kBreaking))) return;
  for (const auto& [rank, member] : group.members) {
    if (member.device == device && member.holds_memory && (over || member.gone()))
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
  const bool over =
      group.is(GroupPhase::kFailing) || group.is(GroupPhase::kLost) || group.is(GroupPhase::kRemoving);
  slot = EngineSlot{};
  if (over) slot.state = EngineSlot::Done{};
  for (auto& [rank, member] : group.members) {
    if (member.device != device) continue;
    member.announced = false;
    const bool stopped = std::holds_alternative<Member::Stopped>(member.submissions);
    const bool awaited = !stopped && (member.gone() || group.is(GroupPhase::kFailing));
    if (awaited) member_has_stopped(member, memory_.next_index(group.id, rank));
  }
  switch (group.phase()) {
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
      const bool all = std::all_of(group.engines.begin(), group.engines.end(),
                                   [](const auto& entry) { return entry.second.is(EnginePhase::kDone); });
      if (all) forget(group.id);
      return;
    }
  }
}

void GroupRegistry::group_ready(std::uint32_t device, const abi::GroupReady& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  if (slot == nullptr || !slot->is(EnginePhase::kStarting)) return;
  Group& group = groups_.at(message.group_id);
  slot->waits_for.clear();
  const bool first_start = group.is(GroupPhase::kStarting);
  if (message.status != StatusCode::kOk) {
    const std::string text(message.text, abi::text_length(message.text));
    slot->state = EngineSlot::Broken{};
    if (first_start) {
      abort_start(group, Status(message.status, text));
      return;
    }
    if (group.is(GroupPhase::kBreaking)) {
      begin_failing(group, {message.status, -1, text}, 0);
    } else if (auto* failing = std::get_if<Group::Failing>(&group.state)) {
      failing->fail_from = 0;
    }
    advance(group);
    return;
  }
  if (!first_start) {
    std::uint64_t next_index = kNever;
    for (const auto& [rank, member] : group.members) {
      if (member.device == device && member.holds_memory && member.presence == Presence::kHere)
        next_index = std::min(next_index, memory_.next_index(group.id, rank));
    }
    slot->state = EngineSlot::Broken{next_index};
    advance(group);
    return;
  }
  slot->state = EngineSlot::Serving{};
  const bool all = std::all_of(group.engines.begin(), group.engines.end(),
                               [](const auto& entry) { return entry.second.is(EnginePhase::kServing); });
  if (!all) return;
  group.state = Group::Active{};
  for (const auto& [rank, member] : group.members) reply_joined(group, member);
}

// Not a step that is late: nobody is to be killed for it. How long the others wait for it is bounded by their
// joins' deadlines.
void GroupRegistry::group_waits(std::uint32_t device, const abi::GroupWaits& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  const bool owes = slot != nullptr && slot->due_ns() != nullptr &&
                    (slot->is(EnginePhase::kStarting) || slot->is(EnginePhase::kServing));
  if (!owes) return;
  *slot->due_ns() = due_in_ms(limits_.engine_start_ms);
  slot->waits_for.assign(message.text, abi::text_length(message.text));
}

void GroupRegistry::rank_refused(std::uint32_t device, const abi::RankRefused& message) {
  if (slot_of(message.group_id, device) == nullptr) return;
  Group& group = groups_.at(message.group_id);
  const auto found = group.members.find(message.rank);
  if (found == group.members.end() || found->second.gone()) return;
  const Status status(message.status, "rank " + std::to_string(message.rank) + ": " +
                                          std::string(message.text, abi::text_length(message.text)));
  if (group.is(GroupPhase::kStarting)) {
    abort_start(group, status);
    return;
  }
  const Member& member = found->second;
  if (member.presence == Presence::kJoining) {
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
