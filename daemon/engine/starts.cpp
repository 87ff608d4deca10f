// Engine: groups that are to begin, or to go on, once the kernels of their commands know of it.

#include "base/log.h"
#include "commands.h"
#include "engine.h"

#include <algorithm>
#include <utility>

namespace epd {

namespace {

constexpr std::uint64_t kFirstWordNs = 5'000'000;   // well within the time that the supervisor gives
constexpr std::uint64_t kNextWordNs = 200'000'000;  // likewise

bool owes_start(const Member& member) {
  return member.commands != nullptr && !member.stopped() && !member.commands->resumed();
}

}  // namespace

void Engine::start_commands(Member& member, bool fresh) {
  member.commands->follow_settings(settings_.default_timeout_ms);
  member.commands->resume(fresh);
}

void Engine::tell_limits(const Group& group) {
  for (const auto& member : group.members) {
    if (member->commands != nullptr) member->commands->follow_settings(settings_.default_timeout_ms);
  }
}

void Engine::owe_start(Group& group) {
  group.owed_since_ns = clock_.round_ns();
  group.waits_logged = false;
  group.say_waits_ns = clock_.round_ns() + kFirstWordNs;
  finish_starts();
}

// Clients ring as soon as they are told that the group goes on, and what is rung before the kernel knows of
// it would be discarded.
void Engine::finish_starts() {
  for (const auto& [id, group] : groups_) {
    if (!group->life.begins()) continue;
    const auto late = std::find_if(group->members.begin(), group->members.end(),
                                   [](const auto& member) { return owes_start(*member); });
    if (late == group->members.end()) {
      start_group(*group);
    } else if (clock_.round_ns() >= group->say_waits_ns) {
      say_waits(**late);
    }
  }
}

// A kernel gets its SMs when what runs there has ended, which may wait for a slow peer: the supervisor is not
// to take that for an engine that hangs. Said as long as this loop turns.
void Engine::say_waits(const Member& late) {
  Group& group = late.group;
  std::string text = "the kernel of rank " + std::to_string(late.rank) + " waits for ";
  if (late.commands->waits_for_room()) {
    text += "SMs of " + device_->name() + holder_of_sms(group);
  } else {
    text += device_->name() + " to begin it";
  }
  // Not of a start that just takes a moment.
  if (clock_.round_ns() >= group.owed_since_ns + kNextWordNs && !std::exchange(group.waits_logged, true))
    log_event(LogLevel::kWarning, "group waits", {{"group", group.id}, {"reason", text}});
  group.say_waits_ns = clock_.round_ns() + kNextWordNs;
  abi::GroupWaits message{group.id, {}};
  abi::set_text(message.text, text.data(), text.size());
  link_.send(abi::LinkType::kGroupWaits, message);
}

// Of the operations of others the one that is in flight for longest: "" if nothing is known to be.
std::string Engine::holder_of_sms(const Group& group) const {
  const auto holds = [](std::uint64_t index, const Member& member) {
    return ", which operation " + std::to_string(index) + " of rank " + std::to_string(member.rank) +
           " of group " + std::to_string(member.group.id) + " holds";
  };
  const Operation* other_moves = schedule_.find([&group](const Operation& operation) {
    return &operation.member().group != &group && operation.is_collective() && operation.in_flight();
  });
  if (other_moves != nullptr) return holds(other_moves->index(), other_moves->member());
  for (const auto& [id, other] : groups_) {
    if (other.get() == &group) continue;
    for (const auto& member : other->members) {
      if (member->commands != nullptr && member->commands->runs())
        return holds(member->next_index(), *member);
    }
  }
  return "";
}

// Commands go on already.
void Engine::start_group(Group& group) {
  const bool is_new = group.life.is(GroupPhase::kStarting);
  group.life.enter(GroupPhase::kActive);
  // The board first: whoever sees a failed operation must find the new epoch there.
  for (const auto& member : group.members) member->publish_state(abi::GroupState::kActive, group.cause);
  if (is_new) {
    link_.send(abi::LinkType::kGroupReady, abi::GroupReady{group.id, StatusCode::kOk, {}});
    return;
  }
  fail_operations(group, 0, group.cause);
  for (const auto& member : group.members) {
    member->failed_from = kNoFailure;
    member->publish_next_index();
    answer_orphans(*member, StatusCode::kEngineRestarted);
  }
  link_.send(abi::LinkType::kResumed, abi::Resumed{group.id, group.epoch});
}

}  // namespace epd
