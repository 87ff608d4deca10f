// A recoverable break that turns fatal first waits for the kBroken it asked for.
#include "breaks.h"

#include <algorithm>

namespace epd::membership {
namespace {

constexpr std::uint32_t kMostGraceMs =
    1'000;  // for engines to acknowledge before clients are told of failures all the same

template <typename Test>
bool all_slots(const Group& group, const Test& test) {
  return std::all_of(group.engines.begin(), group.engines.end(),
                     [&test](const auto& entry) { return test(entry.second); });
}

bool any_took_part(const Group& group) {
  return std::any_of(group.members.begin(), group.members.end(), [&group](const auto& entry) {
    return !entry.second.gone() && entry.second.active_since <= group.epoch;
  });
}

bool has_released(const EngineSlot& slot) {
  return slot.is(EnginePhase::kBroken) || slot.is(EnginePhase::kRemoving) || slot.is(EnginePhase::kDone);
}

}  // namespace

void Breaks::begin(Group& group, BreakReason reason, std::set<std::uint32_t> changed) {
  const std::uint64_t release_due_ns =
      desk_.due_in_ms(std::min(desk_.limits().engine_ack_ms / 3, kMostGraceMs));
  group.state = Group::Breaking{std::move(changed), false, release_due_ns};
  group.reason = std::move(reason);
  refuse_asked(group);
  for (auto& [engine, slot] : group.engines) {
    if (slot.is(EnginePhase::kServing)) steps_.send_break(group, engine);
  }
  advance(group);
}

// Operations have failed since, so these ranks have to resume, repeat them, and ask again.
void Breaks::refuse_asked(Group& group) {
  for (const auto& [rank, join] : std::exchange(group.asked, {}))
    desk_.refuse(join.request.id, {group.reason.cause, group.reason.text});
}

void Breaks::fail(Group& group, BreakReason reason, std::uint64_t fail_from) {
  groups_.drop_name(group);
  group.state = Group::Failing{fail_from};
  group.reason = std::move(reason);
  refuse_joining(group);
  refuse_asked(group);
  for (auto& [rank, arrival] : std::exchange(group.arrivals, {})) {
    members_.drop(group, arrival);
    homeless_.push_back(std::move(arrival.request));  // a late rank's: the group that it names has ended
  }
  for (WaitingJoin& join : std::exchange(group.waiting, {})) homeless_.push_back(std::move(join.request));
  for (auto& [engine, slot] : group.engines) {
    if (!slot.is(EnginePhase::kAbsent)) continue;
    slot.state = EngineSlot::Done{};
    steps_.mark_lost(group, engine);
  }
}

// The group ends before they have come.
void Breaks::refuse_joining(Group& group) {
  for (auto& [rank, member] : group.members) {
    if (member.presence != Presence::kJoining) continue;
    member.presence = Presence::kGone;
    members_.refuse_join(
        member, Status(StatusCode::kAborted, "group \"" + group.name + "\" has ended: " + group.reason.text));
  }
}

void Breaks::advance(Group& group) {
  if (group.is(GroupPhase::kBreaking)) {
    advance_recoverable(group);
  } else if (group.is(GroupPhase::kFailing)) {
    advance_fatal(group);
  }
}

void Breaks::advance_recoverable(Group& group) {
  const bool all = std::all_of(group.engines.begin(), group.engines.end(), [&group](const auto& entry) {
    const EnginePhase phase = entry.second.phase();
    return phase == EnginePhase::kBroken || (phase == EnginePhase::kRemoving && !group.needs(entry.first));
  });
  if (all) {
    resume(group);
  } else if (std::get<Group::Breaking>(group.state).release_due_ns <= desk_.now_ns()) {
    steps_.release_failed(group);
  }
}

void Breaks::advance_fatal(Group& group) {
  auto& failing = std::get<Group::Failing>(group.state);
  const bool stopping = std::any_of(group.members.begin(), group.members.end(), [](const auto& entry) {
    return std::holds_alternative<Member::Stopping>(entry.second.calls);
  });
  const bool owed = !failing.told && !all_slots(group, [](const EngineSlot& s) {
    return !s.is(EnginePhase::kBreaking) && !s.is(EnginePhase::kStarting);
  });
  if (!stopping && !owed) send_fatal(group, failing);
  if (failing.told && all_slots(group, has_released)) become_lost(group);
}

// A stopped rank takes no more calls, so an operation that a living rank has not called by then will never be
// complete. Each rank is asked for its last call after the kBreak. If that is less than the lost rank's, a
// second kBreak fails the difference.
void Breaks::send_fatal(Group& group, Group::Failing& failing) {
  std::uint64_t fail_from = failing.fail_from;
  for (const auto& [rank, member] : group.members) {
    const auto* stopped = std::get_if<Member::Stopped>(&member.calls);
    if (stopped != nullptr) fail_from = std::min(fail_from, stopped->next_submit);
  }
  if (failing.told && fail_from == failing.fail_from) return;
  failing.fail_from = fail_from;
  for (auto& [engine, slot] : group.engines) {
    const auto* broken = std::get_if<EngineSlot::Broken>(&slot.state);
    const bool over = slot.is(EnginePhase::kDone) || slot.is(EnginePhase::kRemoving) ||
                      (broken != nullptr && broken->fatal);
    const bool first = !failing.told && !over;
    if (first || (failing.told && slot.is(EnginePhase::kBreaking))) steps_.send_break(group, engine);
  }
  if (std::exchange(failing.told, true) || fail_from == 0) return;
  for (auto& [rank, member] : group.members) members_.stop(group, member);
}

void Breaks::resume(Group& group) {
  if (group.epoch >= desk_.limits().last_epoch) {
    fail(group,
         {StatusCode::kAborted, -1,
          "epoch " + std::to_string(group.epoch) +
              " is the last that a group can have; allowed: to leave it and join again"},
         0);
    advance(group);
    return;
  }
  // Each new epoch has a rank of the epoch before it, so a rank can always tell whether it missed an epoch.
  if (desk_.spans() && !any_took_part(group)) {
    fail(group, {StatusCode::kRankLost, group.reason.failed_rank, "no rank is left: " + group.reason.text},
         0);
    advance(group);
    return;
  }
  const auto over = std::get<Group::Breaking>(std::exchange(group.state, Group::Active{}));
  if (!over.changed.empty()) ++group.view;
  std::uint64_t resume_index = kNever;
  for (const auto& [engine, slot] : group.engines) {
    if (const auto* broken = std::get_if<EngineSlot::Broken>(&slot.state))
      resume_index = std::min(resume_index, broken->next_index);
  }
  ++group.epoch;
  group.epoch_key = desk_.new_epoch_key();
  // If no rank is left that could say so, nobody has got further.
  if (resume_index != kNever) group.resume_index = resume_index;
  steps_.send_changes(group, over.changed);
  apply_changes(group, over.changed);
  steps_.resume(group, over.reason_changed);
  resumed_.push_back(group.id);
}

void Breaks::apply_changes(Group& group, const std::set<std::uint32_t>& changed) {
  for (const std::uint32_t rank : changed) {
    Member& member = group.members.at(rank);
    if (member.gone()) {
      members_.end(group, member);
      group.members.erase(rank);
      continue;
    }
    member.first_index = group.resume_index;
    member.announced = true;
    desk_.emit(SendMember{member.engine, group.id, describe(member)});
  }
}

void Breaks::become_lost(Group& group) {
  group.state = Group::Lost{};
  for (auto& [rank, member] : group.members) {
    if (member.gone()) members_.release_memory(group, member);
  }
  remove_if_empty(group);
}

void Breaks::remove_if_empty(Group& group) {
  if (group.is(GroupPhase::kLost) && group.all_gone()) remove(group);
}

void Breaks::remove(Group& group) {
  groups_.drop_name(group);
  group.state = Group::Removing{};
  if (!steps_.send_removals(group)) forget(group);
}

void Breaks::forget_if_removed(Group& group) {
  if (all_slots(group, [](const EngineSlot& slot) { return slot.is(EnginePhase::kDone); })) forget(group);
}

void Breaks::forget(Group& group) {
  for (auto& [rank, member] : group.members) members_.end(group, member);
  for (const auto& [rank, arrival] : group.arrivals) members_.drop(group, arrival);
  groups_.erase(group.id);
}

void Breaks::slot_free(Group& group, EngineId engine) {
  if (group.needs(engine)) {
    group.engines.at(engine) = {};
    steps_.start(group, engine);
  } else {
    group.engines.erase(engine);
  }
  advance(group);
}

void Breaks::fail_everything(Group& group) {
  auto& failing = std::get<Group::Failing>(group.state);
  if (std::exchange(failing.fail_from, 0) == 0 || !failing.told) return;
  for (auto& [engine, slot] : group.engines) {
    if (slot.is(EnginePhase::kBreaking)) steps_.send_break(group, engine);
  }
}

Group* Breaks::asked(const BreakRequested& event) {
  const abi::Break& message = event.message;
  if (groups_.find_slot(message.group_id, event.engine) == nullptr) return nullptr;
  Group* const group = groups_.find(message.group_id);
  return message.epoch == group->epoch && group->is(GroupPhase::kActive) ? group : nullptr;
}

BreakReason Breaks::reason_of(const Group& group, const abi::Break& message) {
  const bool is_rank =
      message.failed_rank >= 0 && static_cast<std::uint32_t>(message.failed_rank) < group.shape.num_ranks;
  return {said_cause(message.cause, StatusCode::kAborted), is_rank ? message.failed_rank : -1,
          std::string(message.text, abi::text_length(message.text))};
}

void Breaks::on(const BreakRequested& event) {
  const abi::Break& message = event.message;
  if (Group* const group = asked(event); group != nullptr) {
    begin(*group, reason_of(*group, message));
    return;
  }
  Group* const group = groups_.find(message.group_id);
  const bool known = groups_.find_slot(message.group_id, event.engine) != nullptr;
  if (known && message.epoch == group->epoch && group->is(GroupPhase::kFailing)) fail_everything(*group);
}

void Breaks::on(const Broken& event) {
  const abi::Broken& message = event.message;
  EngineSlot* slot = groups_.find_slot(message.group_id, event.engine);
  if (slot == nullptr || !slot->is(EnginePhase::kBreaking)) return;
  Group& group = *groups_.find(message.group_id);
  if (message.epoch != group.epoch) return;
  slot->state =
      EngineSlot::Broken{message.next_index, false, std::get<EngineSlot::Breaking>(slot->state).fatal};
  advance(group);
}

void Breaks::on(const MemberStopped& event) {
  const abi::MemberRef& message = event.message;
  Group* group = groups_.find(message.group_id);
  if (group == nullptr) return;
  const auto member = group->members.find(message.rank);
  if (member == group->members.end() || member->second.engine != event.engine ||
      !std::holds_alternative<Member::Stopping>(member->second.calls))
    return;
  members_.has_stopped(member->second, message.next_submit);
  advance(*group);
}

void Breaks::on(const GroupRemoved& event) {
  EngineSlot* slot = groups_.find_slot(event.message.group_id, event.engine);
  if (slot == nullptr || !slot->is(EnginePhase::kRemoving)) return;
  slot->state = EngineSlot::Done{};
  Group& group = *groups_.find(event.message.group_id);
  if (group.is(GroupPhase::kActive) || group.is(GroupPhase::kBreaking)) {
    slot_free(group, event.engine);
  } else if (group.is(GroupPhase::kRemoving)) {
    forget_if_removed(group);
  }
}

}  // namespace epd::membership
