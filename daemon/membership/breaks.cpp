// The break protocol. At most one kBreak is unanswered per engine and kind, so that a kBroken is never
// ambiguous: a recoverable break that turns fatal first waits for the kBroken it asked for.
#include "membership/registry.h"

#include <algorithm>

namespace epd::membership {
namespace {

constexpr std::uint32_t kMostGraceMs = 1'000;  // for engines to acknowledge before completions are released

bool has_let_go(const EngineSlot& slot) {
  return slot.is(EnginePhase::kBroken) || slot.is(EnginePhase::kRemoving) || slot.is(EnginePhase::kDone);
}

}  // namespace

void GroupRegistry::stop_member(Group& group, Member& member) {
  if (std::holds_alternative<Member::Stopping>(member.submissions)) return;
  const auto* stopped = std::get_if<Member::Stopped>(&member.submissions);
  const auto* failing = std::get_if<Group::Failing>(&group.state);
  const auto found = group.engines.find(member.device);
  const EnginePhase engine = found != group.engines.end() ? found->second.phase() : EnginePhase::kAbsent;
  if (stopped != nullptr) {
    member_has_stopped(member, stopped->next_submit);
  } else if (engine == EnginePhase::kDone || engine == EnginePhase::kAbsent) {
    // What its old engine had taken and not completed can't be known any more.
    member_has_stopped(member, memory_.next_index(group.id, member.rank));
  } else if (!member.announced || (failing != nullptr && failing->told && engine == EnginePhase::kBroken)) {
    member_has_stopped(member, kNever);  // it has submitted nothing, or everything has failed there already
  } else {
    member.submissions = Member::Stopping{due_in_ms(limits_.engine_ack_ms)};
    emit(SendStopMember{member.device, {group.id, member.rank, 0, 0}});
  }
}

void GroupRegistry::member_has_stopped(Member& member, std::uint64_t next_submit) {
  if (!std::holds_alternative<Member::Stopped>(member.submissions))
    member.submissions = Member::Stopped{next_submit};
  if (!member.leave_request) return;
  emit(ReplyLeft{member.session_id, *member.leave_request, {member.member, 0}});
  member.leave_request.reset();
}

// A failing group's is fatal.
void GroupRegistry::send_break(Group& group, std::uint32_t device) {
  const auto* failing = std::get_if<Group::Failing>(&group.state);
  abi::Break message{};
  message.group_id = group.id;
  message.epoch = group.epoch;
  message.fail_from = failing != nullptr ? failing->fail_from : 0;
  message.fatal = failing != nullptr ? 1 : 0;
  message.cause = group.reason.cause;
  message.culprit_rank = group.reason.culprit_rank;
  abi::set_text(message.text, group.reason.text.data(), group.reason.text.size());
  // Before a fatal break is over, operations that began run to their end.
  const std::uint64_t patience_ms = message.fail_from != 0 ? limits_.operation_ms : 0;
  group.engines.at(device).state = EngineSlot::Breaking{due_in_ms(limits_.engine_ack_ms + patience_ms)};
  emit(SendBreak{device, message});
}

void GroupRegistry::begin_break(Group& group, BreakReason reason, std::set<std::uint32_t> changed) {
  const std::uint64_t release_due_ns = due_in_ms(std::min(limits_.engine_ack_ms / 3, kMostGraceMs));
  group.state = Group::Breaking{std::move(changed), false, release_due_ns};
  group.reason = std::move(reason);
  for (auto& [device, slot] : group.engines) {
    if (slot.is(EnginePhase::kServing)) send_break(group, device);
  }
  advance(group);
}

// `fail_from` 0: nothing runs any more.
void GroupRegistry::begin_failing(Group& group, BreakReason reason, std::uint64_t fail_from) {
  drop_name(group);
  group.state = Group::Failing{fail_from};
  group.reason = std::move(reason);
  refuse_joining(group);
  for (const WaitingJoin& join : std::exchange(group.waiting, {})) this->join(join.request);
  for (auto& [device, slot] : group.engines) {
    if (!slot.is(EnginePhase::kAbsent)) continue;
    slot.state = EngineSlot::Done{};
    mark_members_lost(group, device);
  }
}

// Moves a breaking group on as far as the answers allow. May forget the group.
void GroupRegistry::advance(Group& group) {
  const auto all_slots = [&group](auto&& test) {
    return std::all_of(group.engines.begin(), group.engines.end(),
                       [&test](const auto& entry) { return test(entry.second); });
  };
  if (const auto* breaking = std::get_if<Group::Breaking>(&group.state)) {
    const bool all = std::all_of(group.engines.begin(), group.engines.end(), [&group](const auto& entry) {
      const EnginePhase phase = entry.second.phase();
      return phase == EnginePhase::kBroken || (phase == EnginePhase::kRemoving && !group.needs(entry.first));
    });
    if (all) {
      resume(group);
    } else if (breaking->release_due_ns <= clock_.now_ns()) {
      release_failed(group);
    }
    return;
  }
  auto* failing = std::get_if<Group::Failing>(&group.state);
  if (failing == nullptr) return;
  const bool stopping = std::any_of(group.members.begin(), group.members.end(), [](const auto& entry) {
    return std::holds_alternative<Member::Stopping>(entry.second.submissions);
  });
  const bool owed = !failing->told && !all_slots([](const EngineSlot& s) {
    return !s.is(EnginePhase::kBreaking) && !s.is(EnginePhase::kStarting);
  });
  if (!stopping && !owed) send_fatal(group, *failing);
  if (failing->told && all_slots(has_let_go)) become_lost(group);
}

// From the first kBreak on no rank's submissions are taken any more, so an operation that a living rank has
// not submitted by then will never be complete either. What each had submitted is asked behind the kBreak;
// if that is less than the lost rank's, a second kBreak fails the difference.
void GroupRegistry::send_fatal(Group& group, Group::Failing& failing) {
  std::uint64_t fail_from = failing.fail_from;
  for (const auto& [rank, member] : group.members) {
    const auto* stopped = std::get_if<Member::Stopped>(&member.submissions);
    if (stopped != nullptr) fail_from = std::min(fail_from, stopped->next_submit);
  }
  if (failing.told && fail_from == failing.fail_from) return;
  failing.fail_from = fail_from;
  for (auto& [device, slot] : group.engines) {
    const bool first = !failing.told && !slot.is(EnginePhase::kDone) && !slot.is(EnginePhase::kRemoving);
    if (first || (failing.told && slot.is(EnginePhase::kBreaking))) send_break(group, device);
  }
  if (std::exchange(failing.told, true) || fail_from == 0) return;
  for (auto& [rank, member] : group.members) stop_member(group, member);
}

void GroupRegistry::resume(Group& group) {
  if (group.epoch >= limits_.last_epoch) {
    begin_failing(group,
                  {StatusCode::kAborted, -1,
                   "epoch " + std::to_string(group.epoch) +
                       " is the last that a group can have; allowed: to leave and join it anew"},
                  0);
    advance(group);
    return;
  }
  const auto over = std::get<Group::Breaking>(std::exchange(group.state, Group::Active{}));
  std::uint64_t resume_index = kNever;
  for (const auto& [device, slot] : group.engines) {
    if (const auto* broken = std::get_if<EngineSlot::Broken>(&slot.state))
      resume_index = std::min(resume_index, broken->next_index);
  }
  ++group.epoch;
  // No rank is left of those that could say: then nobody has got further.
  if (resume_index != kNever) group.resume_index = resume_index;
  tell_changes(group, over.changed);
  abi::Resume message{group.id, group.epoch, group.resume_index, StatusCode::kOk, -1, {}};
  if (over.reason_changed) {
    message.cause = group.reason.cause;
    message.culprit_rank = group.reason.culprit_rank;
    abi::set_text(message.text, group.reason.text.data(), group.reason.text.size());
  }
  for (auto& [device, slot] : group.engines) {
    if (!slot.is(EnginePhase::kBroken)) continue;
    slot.waits_for.clear();
    const bool all = group.device_kind == abi::DeviceKind::kCuda;  // see resumed()
    const bool awaited =
        std::any_of(group.members.begin(), group.members.end(), [&, d = device](const auto& e) {
          return (all || e.second.device == d) && e.second.presence == Presence::kJoining;
        });
    slot.state = EngineSlot::Serving{awaited ? due_in_ms(limits_.engine_ack_ms) : 0};
    emit(SendResume{device, message});
  }
  if (!group.waiting.empty()) admit_waiting(group);
}

void GroupRegistry::become_lost(Group& group) {
  group.state = Group::Lost{};
  for (auto& [rank, member] : group.members) {
    if (member.gone()) release_memory(group, member);
  }
  remove_if_empty(group);
}

void GroupRegistry::remove_if_empty(Group& group) {
  if (group.is(GroupPhase::kLost) && group.all_gone()) send_removals(group);
}

void GroupRegistry::send_removal(Group& group, std::uint32_t device) {
  group.engines.at(device).state = EngineSlot::Removing{due_in_ms(limits_.engine_ack_ms)};
  emit(SendRemoveGroup{device, {group.id}});
}

// May forget the group.
void GroupRegistry::send_removals(Group& group) {
  group.state = Group::Removing{};
  bool waiting = false;
  for (auto& [device, slot] : group.engines) {
    if (slot.is(EnginePhase::kAbsent) || slot.is(EnginePhase::kDone)) {
      slot.state = EngineSlot::Done{};
      continue;
    }
    waiting = true;
    if (!slot.is(EnginePhase::kRemoving)) send_removal(group, device);
  }
  if (!waiting) forget(group.id);
}

void GroupRegistry::mark_members_lost(Group& group, std::uint32_t device) {
  for (const auto& [rank, member] : group.members) {
    if (member.device != device || !member.holds_memory) continue;
    memory_.mark_lost(group.id, rank, group.reason.text, group.reason.cause, group.reason.culprit_rank);
    if (!member.gone()) emit(WakeSession{member.session_id});
  }
}

void GroupRegistry::break_requested(std::uint32_t device, const abi::Break& message) {
  const auto found = groups_.find(message.group_id);
  if (found == groups_.end() || slot_of(message.group_id, device) == nullptr) return;
  Group& group = found->second;
  if (message.epoch != group.epoch) return;
  if (group.is(GroupPhase::kActive)) {
    const std::string text(message.text, abi::text_length(message.text));
    begin_break(group, {message.cause, message.culprit_rank, text});
  } else if (group.is(GroupPhase::kFailing)) {
    fail_everything(group);
  }
}

// An operation that was to run to its end can't, or takes too long: now none does.
void GroupRegistry::fail_everything(Group& group) {
  auto& failing = std::get<Group::Failing>(group.state);
  if (std::exchange(failing.fail_from, 0) == 0 || !failing.told) return;
  for (auto& [device, slot] : group.engines) {
    if (slot.is(EnginePhase::kBreaking)) send_break(group, device);
  }
}

void GroupRegistry::broken(std::uint32_t device, const abi::Broken& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  if (slot == nullptr || !slot->is(EnginePhase::kBreaking)) return;
  Group& group = groups_.at(message.group_id);
  if (message.epoch != group.epoch) return;
  slot->state = EngineSlot::Broken{message.next_index};
  advance(group);
}

void GroupRegistry::member_stopped(std::uint32_t device, const abi::MemberRef& message) {
  if (slot_of(message.group_id, device) == nullptr) return;
  Group& group = groups_.at(message.group_id);
  const auto member = group.members.find(message.rank);
  if (member == group.members.end() || member->second.device != device ||
      !std::holds_alternative<Member::Stopping>(member->second.submissions))
    return;
  member_has_stopped(member->second, message.next_submit);
  advance(group);
}

void GroupRegistry::group_removed(std::uint32_t device, const abi::GroupRef& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  if (slot == nullptr || !slot->is(EnginePhase::kRemoving)) return;
  slot->state = EngineSlot::Done{};
  Group& group = groups_.at(message.group_id);
  if (group.is(GroupPhase::kActive) || group.is(GroupPhase::kBreaking)) {
    slot_free(group, device);
    return;
  }
  if (!group.is(GroupPhase::kRemoving)) return;
  const bool all = std::all_of(group.engines.begin(), group.engines.end(),
                               [](const auto& entry) { return entry.second.is(EnginePhase::kDone); });
  if (all) forget(message.group_id);
}

}  // namespace epd::membership
