// The break protocol. At most one kBreak is unanswered per engine and kind, so that a kBroken is never
// ambiguous: a recoverable break that turns fatal first waits for the kBroken it asked for.
#include "membership/registry.h"

#include <algorithm>
#include <limits>

namespace epd::membership {
namespace {

constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint32_t kMostGraceMs = 1'000;  // for engines to acknowledge before completions are released

bool has_let_go(const EngineSlot& slot) {
  return slot.phase == EnginePhase::kBroken || slot.phase == EnginePhase::kRemoving ||
         slot.phase == EnginePhase::kDone;
}

}  // namespace

void GroupRegistry::stop_member(Group& group, Member& member) {
  if (member.stop_due_ns != 0) return;  // asked already
  const auto found = group.engines.find(member.device);
  const EngineSlot slot = found != group.engines.end() ? found->second : EngineSlot{};
  if (member.next_submit) {
    member_has_stopped(member, *member.next_submit);
  } else if (slot.phase == EnginePhase::kDone || slot.phase == EnginePhase::kAbsent) {
    // What its old engine had taken and not completed can't be known any more.
    member_has_stopped(member, memory_.next_index(group.id, member.rank));
  } else if (!member.announced || (group.fatal_sent && slot.phase == EnginePhase::kBroken)) {
    member_has_stopped(member, kNever);  // it has submitted nothing, or everything has failed there already
  } else {
    member.stop_due_ns = due_in_ms(limits_.engine_ack_ms);
    emit(SendStopMember{member.device, {group.id, member.rank, 0, 0}});
  }
}

void GroupRegistry::member_has_stopped(Member& member, std::uint64_t next_submit) {
  member.stop_due_ns = 0;
  if (!member.next_submit) member.next_submit = next_submit;
  if (!member.leave_request) return;
  emit(ReplyLeft{member.session_id, *member.leave_request, {member.member, 0}});
  member.leave_request.reset();
}

void GroupRegistry::send_break(Group& group, std::uint32_t device, bool fatal) {
  abi::Break message{};
  message.group_id = group.id;
  message.epoch = group.epoch;
  message.fail_from = fatal ? group.fail_from : 0;
  message.fatal = fatal ? 1 : 0;
  message.cause = group.reason.cause;
  message.culprit_rank = group.reason.culprit_rank;
  abi::set_text(message.text, group.reason.text.data(), group.reason.text.size());
  EngineSlot& slot = group.engines.at(device);
  slot.phase = EnginePhase::kBreaking;
  // Before a fatal break is over, operations that began run to their end.
  const bool patient = fatal && group.fail_from != 0;
  slot.due_ns = due_in_ms(std::uint64_t{limits_.engine_ack_ms} + (patient ? limits_.operation_ms : 0));
  emit(SendBreak{device, message});
}

void GroupRegistry::begin_break(Group& group, BreakReason reason) {
  group.phase = GroupPhase::kBreaking;
  group.reason = std::move(reason);
  group.reason_changed = false;
  group.release_due_ns = due_in_ms(std::min(limits_.engine_ack_ms / 3, kMostGraceMs));
  for (auto& [device, slot] : group.engines) {
    slot.released = false;
    if (slot.phase == EnginePhase::kServing) send_break(group, device, false);
  }
  advance(group);
}

void GroupRegistry::begin_failing(Group& group, BreakReason reason) {
  drop_name(group);
  group.phase = GroupPhase::kFailing;
  group.reason = std::move(reason);
  group.release_due_ns = 0;
  group.fatal_sent = false;
  group.fail_from = kNever;
  refuse_joining(group);
  for (const WaitingJoin& join : std::exchange(group.waiting, {})) this->join(join.request);
  for (auto& [device, slot] : group.engines) {
    if (slot.phase != EnginePhase::kAbsent) continue;
    slot.phase = EnginePhase::kDone;
    mark_members_lost(group, device);
  }
}

// Moves a breaking group on as far as the answers allow. May forget the group.
void GroupRegistry::advance(Group& group) {
  const auto all_slots = [&group](auto&& test) {
    return std::all_of(group.engines.begin(), group.engines.end(),
                       [&test](const auto& entry) { return test(entry.second); });
  };
  if (group.phase == GroupPhase::kBreaking) {
    const bool all = std::all_of(group.engines.begin(), group.engines.end(), [&group](const auto& entry) {
      const EnginePhase phase = entry.second.phase;
      return phase == EnginePhase::kBroken || (phase == EnginePhase::kRemoving && !group.needs(entry.first));
    });
    if (all) {
      resume(group);
    } else if (group.release_due_ns <= clock_.now_ns()) {
      release_failed(group);
    }
    return;
  }
  if (group.phase != GroupPhase::kFailing) return;
  const bool stopping = std::any_of(group.members.begin(), group.members.end(),
                                    [](const auto& entry) { return entry.second.stop_due_ns != 0; });
  const bool owed = !group.fatal_sent && !all_slots([](const EngineSlot& s) {
    return s.phase != EnginePhase::kBreaking && s.phase != EnginePhase::kStarting;
  });
  if (!stopping && !owed) send_fatal(group);
  if (group.fatal_sent && all_slots(has_let_go)) become_lost(group);
}

// From the first kBreak on no rank's submissions are taken any more, so an operation that a living rank has
// not submitted by then will never be complete either. What each had submitted is asked behind the kBreak;
// if that is less than the lost rank's, a second kBreak fails the difference.
void GroupRegistry::send_fatal(Group& group) {
  std::uint64_t fail_from = group.fail_from;
  for (const auto& [rank, member] : group.members) {
    if (member.next_submit) fail_from = std::min(fail_from, *member.next_submit);
  }
  if (group.fatal_sent && fail_from == group.fail_from) return;
  group.fail_from = fail_from;
  for (auto& [device, slot] : group.engines) {
    const bool first =
        !group.fatal_sent && slot.phase != EnginePhase::kDone && slot.phase != EnginePhase::kRemoving;
    if (first || (group.fatal_sent && slot.phase == EnginePhase::kBreaking)) send_break(group, device, true);
  }
  if (std::exchange(group.fatal_sent, true) || fail_from == 0) return;
  for (auto& [rank, member] : group.members) stop_member(group, member);
}

void GroupRegistry::resume(Group& group) {
  if (group.epoch >= limits_.last_epoch) {
    begin_failing(group, {StatusCode::kAborted, -1,
                          "epoch " + std::to_string(group.epoch) +
                              " is the last that a group can have; allowed: to leave and join it anew"});
    group.fail_from = 0;  // nothing runs any more
    advance(group);
    return;
  }
  std::uint64_t resume_index = kNever;
  for (const auto& [device, slot] : group.engines) {
    if (slot.phase == EnginePhase::kBroken) resume_index = std::min(resume_index, slot.next_index);
  }
  ++group.epoch;
  // No rank is left of those that could say: then nobody has got further.
  if (resume_index != kNever) group.resume_index = resume_index;
  group.phase = GroupPhase::kActive;
  group.release_due_ns = 0;
  tell_changes(group);
  abi::Resume message{group.id, group.epoch, group.resume_index, StatusCode::kOk, -1, {}};
  if (std::exchange(group.reason_changed, false)) {
    message.cause = group.reason.cause;
    message.culprit_rank = group.reason.culprit_rank;
    abi::set_text(message.text, group.reason.text.data(), group.reason.text.size());
  }
  for (auto& [device, slot] : group.engines) {
    if (slot.phase != EnginePhase::kBroken) continue;
    slot.phase = EnginePhase::kServing;
    slot.waits_for.clear();
    const bool all = group.device_kind == abi::DeviceKind::kCuda;  // see resumed()
    const bool awaited = std::any_of(
        group.members.begin(), group.members.end(),
        [&, d = device](const auto& e) { return (all || e.second.device == d) && e.second.joining; });
    if (awaited) slot.due_ns = due_in_ms(limits_.engine_ack_ms);
    emit(SendResume{device, message});
  }
  if (!group.waiting.empty()) admit_waiting(group);
}

void GroupRegistry::become_lost(Group& group) {
  group.phase = GroupPhase::kLost;
  for (auto& [rank, member] : group.members) {
    if (member.gone) release_memory(group, member);
  }
  remove_if_empty(group);
}

void GroupRegistry::remove_if_empty(Group& group) {
  if (group.phase == GroupPhase::kLost && group.all_gone()) send_removals(group);
}

// May forget the group.
void GroupRegistry::send_removals(Group& group) {
  group.phase = GroupPhase::kRemoving;
  bool waiting = false;
  for (auto& [device, slot] : group.engines) {
    if (slot.phase == EnginePhase::kAbsent || slot.phase == EnginePhase::kDone) {
      slot.phase = EnginePhase::kDone;
      continue;
    }
    waiting = true;
    if (slot.phase == EnginePhase::kRemoving) continue;
    slot.phase = EnginePhase::kRemoving;
    slot.due_ns = due_in_ms(limits_.engine_ack_ms);
    emit(SendRemoveGroup{device, {group.id}});
  }
  if (!waiting) forget(group.id);
}

void GroupRegistry::mark_members_lost(Group& group, std::uint32_t device) {
  for (const auto& [rank, member] : group.members) {
    if (member.device != device || !member.holds_memory) continue;
    memory_.mark_lost(group.id, rank, group.reason.text, group.reason.cause, group.reason.culprit_rank);
    if (!member.gone) emit(WakeSession{member.session_id});
  }
}

void GroupRegistry::break_requested(std::uint32_t device, const abi::Break& message) {
  const auto found = groups_.find(message.group_id);
  if (found == groups_.end() || slot_of(message.group_id, device) == nullptr) return;
  Group& group = found->second;
  if (message.epoch != group.epoch) return;
  if (group.phase == GroupPhase::kActive) {
    const std::string text(message.text, abi::text_length(message.text));
    begin_break(group, {message.cause, message.culprit_rank, text});
  } else if (group.phase == GroupPhase::kFailing) {
    fail_everything(group);
  }
}

// An operation that was to run to its end can't, or takes too long: now none does.
void GroupRegistry::fail_everything(Group& group) {
  if (std::exchange(group.fail_from, 0) == 0 || !group.fatal_sent) return;
  for (auto& [device, slot] : group.engines) {
    if (slot.phase == EnginePhase::kBreaking) send_break(group, device, true);
  }
}

void GroupRegistry::broken(std::uint32_t device, const abi::Broken& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  if (slot == nullptr || slot->phase != EnginePhase::kBreaking) return;
  Group& group = groups_.at(message.group_id);
  if (message.epoch != group.epoch) return;
  slot->phase = EnginePhase::kBroken;
  slot->due_ns = 0;
  slot->next_index = message.next_index;
  advance(group);
}

void GroupRegistry::member_stopped(std::uint32_t device, const abi::MemberRef& message) {
  if (slot_of(message.group_id, device) == nullptr) return;
  Group& group = groups_.at(message.group_id);
  const auto member = group.members.find(message.rank);
  if (member == group.members.end() || member->second.device != device || member->second.stop_due_ns == 0)
    return;
  member_has_stopped(member->second, message.next_submit);
  advance(group);
}

void GroupRegistry::group_removed(std::uint32_t device, const abi::GroupRef& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  if (slot == nullptr || slot->phase != EnginePhase::kRemoving) return;
  slot->phase = EnginePhase::kDone;
  slot->due_ns = 0;
  Group& group = groups_.at(message.group_id);
  if (group.phase == GroupPhase::kActive || group.phase == GroupPhase::kBreaking) {
    slot_free(group, device);
    return;
  }
  if (group.phase != GroupPhase::kRemoving) return;
  const bool all = std::all_of(group.engines.begin(), group.engines.end(),
                               [](const auto& entry) { return entry.second.phase == EnginePhase::kDone; });
  if (all) forget(message.group_id);
}

}  // namespace epd::membership
