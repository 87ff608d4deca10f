// Engine: its part in the break protocol (daemon/README): a group stands still, goes on, or ends.

#include "commands.h"
#include "engine.h"

#include <cstring>

namespace epd {

using abi::LinkType;

Status Engine::stop_member(const abi::MemberRef& message) {
  Group* group = find_group(message.group_id);
  Member* member = group == nullptr ? nullptr : find_member(*group, message.rank);
  const bool refused = group != nullptr && group->refused.count(message.rank) == 1;
  if (member == nullptr && !refused)
    return invalid_argument("kStopMember for group " + std::to_string(message.group_id));
  if (member != nullptr) member->stop();
  stops_.push_back(message);
  answer_stops();
  return {};
}

Status Engine::break_group(const abi::Break& message) {
  Group* group = find_group(message.group_id);
  if (group != nullptr && group->life.begins()) start_group(*group);  // nobody has enqueued anything yet
  const bool fatal = message.fatal != 0;
  if (group == nullptr || !(fatal ? group->life.may_lose() : group->life.may(GroupPhase::kBreaking)))
    return invalid_argument("kBreak for group " + std::to_string(message.group_id));
  if (fatal) {
    group->life.lose();
  } else {
    finish_arrived(*group);
    group->life.enter(GroupPhase::kBreaking);
  }
  group->cause = message;
  group->broken_ns = clock_.round_ns();
  for (const auto& member : group->members) {
    for (Operation* operation : member->operations) {
      if (operation->index() >= (fatal ? message.fail_from : 0)) operation->abandon();
    }
    if (!fatal && member->commands != nullptr) member->commands->halt();
  }
  const auto state = fatal ? abi::GroupState::kLost : abi::GroupState::kBroken;
  for (const auto& member : group->members) member->publish_state(state, message);
  if (fatal) {
    fail_operations(*group, message.fail_from, message);
    for (const auto& member : group->members) answer_orphans(*member, message.cause);
  }
  return {};
}

Status Engine::resume_group(const abi::Resume& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr || !group->life.may(GroupPhase::kResuming))
    return invalid_argument("kResume for group " + std::to_string(message.group_id));
  group->life.enter(GroupPhase::kResuming);
  group->epoch = message.epoch;
  group->resume_index = message.resume_index;
  clear_signals(*group);
  if (message.cause != StatusCode::kOk) {
    group->cause.cause = message.cause;
    group->cause.culprit_rank = message.culprit_rank;
    std::memcpy(group->cause.text, message.text, sizeof(message.text));
  }
  for (const auto& member : group->members) {
    member->next_number = message.resume_index;
    if (member->commands != nullptr) start_commands(*member, false);
  }
  owe_start(*group);
  return {};
}

// Some other engine is silent. It may still write into buffers of the operations that fail here, but no
// later operation can begin before it has spoken.
Status Engine::release_group(const abi::GroupRef& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr || !group->life.may(GroupPhase::kReleased))
    return invalid_argument("kRelease for group " + std::to_string(message.group_id));
  group->life.enter(GroupPhase::kReleased);
  fail_operations(*group, 0, group->cause);
  return {};
}

// Its operations fail, each when the device has left it; then it is forgotten. A device that does not let go
// has its engine killed by the supervisor, which waits for the answer.
Status Engine::remove_group(const abi::GroupRef& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr) {
    reclaimer_.then([this, message] { link_.send(LinkType::kGroupRemoved, message); });
    return {};
  }
  group->life.enter(GroupPhase::kRemoving);
  group->cause = {group->id, group->epoch, 0, 1, StatusCode::kAborted, -1, "the group was removed"};
  for (const auto& member : group->members) {
    for (Operation* operation : member->operations) operation->abandon();
    if (member->commands != nullptr) member->commands->halt();
  }
  fail_operations(*group, 0, group->cause);
  finish_removals();
  return {};
}

void Engine::finish_removals() {
  for (auto it = groups_.begin(); it != groups_.end();) {
    Group& group = *it->second;
    if (!group.life.is(GroupPhase::kRemoving) || group.has_operations() || !commands_halted(group)) {
      ++it;
      continue;
    }
    forget(group);
    it = groups_.erase(it);
  }
}

void Engine::forget(Group& group) {
  for (const auto& member : group.members) {
    answer_orphans(*member, StatusCode::kAborted);
    if (member->session != nullptr) member->session->end_member(member->number);
    reclaimer_.take(*member);
  }
  for (GroupRankMemory& rank : group.ranks) reclaimer_.take(rank);
  // Not before nothing of it is mapped here, see give_up_memory.
  reclaimer_.then([this, id = group.id] { link_.send(LinkType::kGroupRemoved, abi::GroupRef{id}); });
}

}  // namespace epd
