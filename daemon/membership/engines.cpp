#include "engines.h"

#include <algorithm>
#include <utility>

namespace epd::membership {
namespace {

// A group that an engine can't start: it dies of it, or has to be killed. A new group is given up first,
// since the engine's other groups are started again each time and look the same.
constexpr std::uint32_t kMostFailedStarts = 3;
constexpr std::uint32_t kMostFailedRestarts = 6;

}  // namespace

void Engines::on(const EngineUp& event) {
  parts_.nodes.engine_up(event);
  std::set<EngineId> told;
  for (auto& [id, group] : parts_.groups.all()) {
    parts_.rejoins.admit(group);
    parts_.steps.close_streams(group, event.engine);
    if (!group.is(GroupPhase::kStarting) && !group.is(GroupPhase::kBreaking)) continue;
    const auto slot = group.engines.find(event.engine);
    if (slot == group.engines.end() || !slot->second.is(EnginePhase::kAbsent)) continue;
    parts_.steps.introduce(group, event.engine, told);
    parts_.steps.start(group, event.engine);
  }
}

void Engines::on(const EngineDown& event) {
  parts_.nodes.engine_down(event.engine);
  parts_.pairs.engine_down(event.engine);
  keep_boards(event.engine, event.boards);
  for (const std::uint64_t id : parts_.groups.ids()) {
    if (parts_.groups.find_slot(id, event.engine) != nullptr)
      down_for(*parts_.groups.find(id), event.engine, event.text);
  }
}

// An engine speaks for the ranks on its device alone.
void Engines::keep_boards(EngineId engine, const std::vector<BoardIndex>& boards) {
  for (const BoardIndex& board : boards) {
    Group* group = parts_.groups.find(board.group_id);
    if (group == nullptr) continue;
    const auto member = group->members.find(board.rank);
    if (member != group->members.end() && member->second.engine == engine)
      member->second.board_index = board.next_index;
  }
}

// Which node a text is of: it reaches clients of all nodes.
std::string Engines::said_by(EngineId engine) const {
  return engine.node == kLocalNode ? "" : parts_.nodes.name_of(engine.node) + ": ";
}

void Engines::down_for(Group& group, EngineId engine, const std::string& text) {
  EngineSlot& slot = group.engines.at(engine);
  const bool started = slot.is(EnginePhase::kStarting);
  const bool over =
      group.is(GroupPhase::kFailing) || group.is(GroupPhase::kLost) || group.is(GroupPhase::kRemoving);
  const std::uint32_t failed_starts = slot.failed_starts + (started ? 1 : 0);
  slot = EngineSlot{};
  slot.failed_starts = failed_starts;
  if (over) slot.state = EngineSlot::Done{};
  for (auto& [rank, member] : group.members) {
    if (member.engine != engine) continue;
    member.announced = false;
    const bool stopped = std::holds_alternative<Member::Stopped>(member.calls);
    const bool awaited = !stopped && (member.gone() || group.is(GroupPhase::kFailing));
    if (awaited) parts_.members.has_stopped(member, member.board_index);
  }
  switch (group.phase()) {
    case GroupPhase::kForming: return;
    case GroupPhase::kStarting:
      if (started) gives_up(group, engine, text);
      return;
    case GroupPhase::kBreaking:
      if (started && group.needs(engine) && gives_up(group, engine, text)) return;
      if (!group.needs(engine)) parts_.breaks.slot_free(group, engine);
      return;
    case GroupPhase::kActive:
      if (group.needs(engine)) {
        parts_.breaks.begin(group, group.reason_of_end(engine, said_by(engine) + text));
      } else {
        parts_.breaks.slot_free(group, engine);
      }
      return;
    case GroupPhase::kFailing:
      parts_.steps.mark_lost(group, engine);
      parts_.breaks.advance(group);
      return;
    case GroupPhase::kLost: parts_.steps.mark_lost(group, engine); return;
    case GroupPhase::kRemoving: parts_.breaks.forget_if_removed(group); return;
  }
}

bool Engines::gives_up(Group& group, EngineId engine, const std::string& text) {
  const bool is_new = group.is(GroupPhase::kStarting);
  const std::uint32_t failed = group.engines.at(engine).failed_starts;
  if (failed < (is_new ? kMostFailedStarts : kMostFailedRestarts)) return false;
  not_ready(group, engine,
            Status(StatusCode::kInternal, parts_.nodes.in_words(engine) + " went down " +
                                              std::to_string(failed) + " times while it started group \"" +
                                              group.name + "\", at last: " + text));
  return true;
}

void Engines::on(const GroupReady& event) {
  const abi::GroupReady& message = event.message;
  EngineSlot* slot = parts_.groups.find_slot(message.group_id, event.engine);
  if (slot == nullptr || !slot->is(EnginePhase::kStarting)) return;
  Group& group = *parts_.groups.find(message.group_id);
  slot->waits_for.clear();
  slot->failed_starts = 0;
  if (message.status != StatusCode::kOk) {
    slot->state = EngineSlot::Broken{kNever};
    not_ready(group, event.engine,
              {said_cause(message.status, StatusCode::kInternal),
               said_by(event.engine) + std::string(message.text, abi::text_length(message.text))});
  } else if (group.is(GroupPhase::kStarting)) {
    slot->state = EngineSlot::Serving{};
    parts_.forming.engine_ready(group);
  } else {
    keep_boards(event.engine, event.boards);
    std::uint64_t next_index = kNever;
    for (const auto& [rank, member] : group.members) {
      if (member.engine == event.engine && member.holds_memory && member.presence == Presence::kHere)
        next_index = std::min(next_index, member.board_index);
    }
    slot->state = EngineSlot::Broken{next_index, false, false, true};
    parts_.breaks.advance(group);
  }
}

void Engines::not_ready(Group& group, EngineId engine, const Status& status) {
  if (group.is(GroupPhase::kStarting)) {
    parts_.forming.abort_start(group, status);
  } else if (group.is(GroupPhase::kBreaking)) {
    parts_.departures.cannot_serve(group, engine, status);
  } else {
    if (auto* failing = std::get_if<Group::Failing>(&group.state)) failing->fail_from = 0;
    parts_.breaks.advance(group);
  }
}

// Not a step that is late: nobody is to be killed for it. How long the others wait for it is bounded by their
// joins' deadlines. Nothing else bounds a start amid a break, so that has its one deadline.
void Engines::on(const GroupWaits& event) {
  EngineSlot* slot = parts_.groups.find_slot(event.message.group_id, event.engine);
  const bool owes = slot != nullptr && slot->due_ns() != nullptr &&
                    (slot->is(EnginePhase::kStarting) || slot->is(EnginePhase::kServing));
  if (!owes) return;
  const bool bounded = slot->is(EnginePhase::kServing) ||
                       parts_.groups.find(event.message.group_id)->is(GroupPhase::kStarting);
  if (bounded) *slot->due_ns() = desk_.due_in_ms(desk_.limits().engine_start_ms);
  slot->waits_for.assign(event.message.text, abi::text_length(event.message.text));
}

void Engines::on(const Resumed& event) {
  EngineSlot* slot = parts_.groups.find_slot(event.message.group_id, event.engine);
  auto* serving = slot == nullptr ? nullptr : std::get_if<EngineSlot::Serving>(&slot->state);
  if (serving == nullptr) return;
  Group& group = *parts_.groups.find(event.message.group_id);
  if (event.message.epoch != group.epoch) return;
  slot->resumed = group.epoch;
  serving->due_ns = 0;
  slot->waits_for.clear();
  // On CUDA devices a newcomer may look at its peers' signals only after all of them have cleared those.
  const bool all = group.device_kind == abi::DeviceKind::kCuda;
  if (all && std::any_of(group.engines.begin(), group.engines.end(), [](auto& entry) {
        return entry.second.is(EnginePhase::kServing) && entry.second.due_ns() != nullptr;
      })) {
    return;
  }
  for (auto& [rank, member] : group.members) {
    if ((!all && member.engine != event.engine) || member.presence != Presence::kJoining) continue;
    member.presence = Presence::kHere;
    group.late.erase(rank);
    parts_.members.reply_joined(group, member);
  }
}

// Whoever is late is asked again after a while.
bool Engines::is_overdue(std::uint64_t* due_ns) const {
  if (due_ns == nullptr || *due_ns > desk_.now_ns()) return false;
  *due_ns = desk_.due_in_ms(desk_.limits().engine_ack_ms);
  return true;
}

// An engine that misses a deadline is killed. One that lives on is stopped, so nothing can be had from it.
void Engines::tick(Group& group) {
  for (auto& [engine, slot] : group.engines) {
    if (!is_overdue(slot.due_ns())) continue;
    const auto* failing = std::get_if<Group::Failing>(&group.state);
    if (failing != nullptr && failing->told && failing->fail_from != 0) {
      parts_.breaks.fail_everything(group);
    } else {
      desk_.emit(KillEngine{engine, "no answer to a step of group " + std::to_string(group.id) + " in time"});
    }
  }
  const bool stopped = tick_stopping(group);
  const auto* breaking = std::get_if<Group::Breaking>(&group.state);
  if (breaking != nullptr && breaking->release_due_ns <= desk_.now_ns()) parts_.steps.release_failed(group);
  if (stopped) parts_.breaks.advance(group);
}

// Whether the answer of one is given up: what its rank had submitted can't be known.
bool Engines::tick_stopping(Group& group) {
  bool stopped = false;
  for (auto& [rank, member] : group.members) {
    auto* stopping = std::get_if<Member::Stopping>(&member.calls);
    if (stopping == nullptr || !is_overdue(&stopping->due_ns)) continue;
    desk_.emit(KillEngine{member.engine, "rank " + std::to_string(rank) + " of group " +
                                             std::to_string(group.id) + " in time not stopped"});
    if (!std::exchange(stopping->asked_again, true)) continue;
    parts_.members.has_stopped(member, 0);
    stopped = true;
  }
  return stopped;
}

}  // namespace epd::membership
