// Groups, second part: the break protocol (daemon/README). A group halts, continues, or ends.
#include "base/log.h"
#include "calls.h"
#include "groups.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace epd::engine {

using abi::LinkType;

Status Groups::stop_member(const abi::MemberRef& message) {
  Group* group = find(message.group_id);
  Member* member = group == nullptr ? nullptr : group->member(message.rank);
  const bool refused = group != nullptr && group->refused.count(message.rank) == 1;
  if (member == nullptr && !refused)
    return invalid_argument("kStopMember for group " + std::to_string(message.group_id));
  if (member != nullptr) member->stop();
  stops_.push_back(message);
  answer_stops();
  return {};
}

// Reports what each rank has called: on a host device with the call that runs, on a GPU when nothing runs any
// more.
void Groups::answer_stops() {
  std::erase_if(stops_, [this](abi::MemberRef& reply) {
    Group* group = find(reply.group_id);
    if (group == nullptr) return true;
    Member* member = group->member(reply.rank);
    reply.next_submit = member != nullptr ? member->next_number : group->resume_index;
    if (member != nullptr && member->calls != nullptr) {
      if (!member->calls->stopped()) return false;
      journals_.read(*member);
      reply.next_submit = member->next_number + (member->calls->is_running() ? 1 : 0);
    }
    link_.send(LinkType::kMemberStopped, reply);
    return true;
  });
}

Status Groups::break_group(const abi::Break& message) {
  Group* group = find(message.group_id);
  if (group != nullptr && group->life.begins()) starts_.begin(*group);
  const bool fatal = message.fatal != 0;
  if (group == nullptr || !(fatal ? group->life.may_lose() : group->life.may(GroupPhase::kBreaking)))
    return invalid_argument("kBreak for group " + std::to_string(message.group_id));
  if (fatal) {
    group->life.lose();
  } else {
    group->life.enter(GroupPhase::kBreaking);
  }
  group->cause = message;
  group->broken_ns = clock_.round_ns();
  for (const auto& member : group->members) {
    if (!fatal && member->calls != nullptr) member->calls->halt();
  }
  if (group->life.is(GroupPhase::kLosing)) return {};  // give_up_memory() tells
  const auto state = fatal ? abi::GroupState::kLost : abi::GroupState::kBroken;
  for (const auto& member : group->members) member->publish_state(state, message);
  return {};
}

void Groups::acknowledge_break(Group& group) {
  const bool gone = group.life.is(GroupPhase::kUnmapped);
  if (!gone && (!group.life.is(GroupPhase::kBreaking) || !group.settled())) return;
  journals_.read(group);
  if (group.far != nullptr) group.far->end();
  std::uint64_t next = std::numeric_limits<std::uint64_t>::max();
  for (const auto& member : group.members) {
    if (!member->stopped()) next = std::min(next, member->next_index());
  }
  group.life.enter(gone ? GroupPhase::kLost : GroupPhase::kBroken);
  link_.send(LinkType::kBroken, abi::Broken{group.id, group.cause.epoch, next});
}

// For a lost group, when its calls have ended: a client that is told of the loss waits for none of them any
// more. The supervisor is told only after the memory has been unmapped here: the last process to close a
// memory has to free all its pages.
void Groups::give_up_memory(Group& group) {
  if (!group.life.is(GroupPhase::kLosing) || !group.settled()) return;
  for (const auto& member : group.members) {
    journals_.read(*member);
    journals_.remove(*member);
    member->publish_state(abi::GroupState::kLost, group.cause);
    member->calls.reset();
    if (member->lane != nullptr) reclaimer_.take(*member->lane);
    member->lane.reset();
  }
  end_far(group);
  ranks_.unmap(group);
  group.life.enter(GroupPhase::kUnmapping);
  reclaimer_.then([this, id = group.id] {
    if (Group* lost = find(id); lost != nullptr) lost->life.enter(GroupPhase::kUnmapped);
  });
}

Status Groups::resume_group(const abi::Resume& message) {
  Group* group = find(message.group_id);
  if (group == nullptr || !group->life.may(GroupPhase::kResuming))
    return invalid_argument("kResume for group " + std::to_string(message.group_id));
  group->life.enter(GroupPhase::kResuming);
  group->epoch = message.epoch;
  group->resume_index = message.resume_index;
  ranks_.clear_signals(*group);
  if (message.cause != StatusCode::kOk) {
    group->cause.cause = message.cause;
    group->cause.failed_rank = message.failed_rank;
    std::memcpy(group->cause.text, message.text, sizeof(message.text));
  }
  for (const auto& member : group->members) member->next_number = message.resume_index;
  if (group->far != nullptr) {
    group->far->set_epoch(message.view, message.epoch_key);
    // A loss may have moved gateways here, which need more memory than was promised at the start.
    if (const Status far = begin_far(*group); !far.ok())
      log_event(LogLevel::kWarning, "more memory than promised",
                {{"group", group->id}, {"name", group->name}, {"reason", far.message()}});
  }
  start_calls(*group, false);
  starts_.owe(*group);
  return {};
}

// Another engine is silent. It may still write into buffers of the operations that fail here. But no later
// operation can begin before it has answered.
Status Groups::release_group(const abi::GroupRef& message) {
  Group* group = find(message.group_id);
  if (group == nullptr || !group->life.may(GroupPhase::kReleased))
    return invalid_argument("kRelease for group " + std::to_string(message.group_id));
  group->life.enter(GroupPhase::kReleased);
  for (const auto& member : group->members) member->publish_state(abi::GroupState::kBroken, group->cause);
  return {};
}

// The group's calls end when the device has left them. Then the group is forgotten. If the device does not
// leave one, the supervisor, which waits for the answer, kills the engine.
Status Groups::remove_group(const abi::GroupRef& message) {
  Group* group = find(message.group_id);
  if (group == nullptr) {
    reclaimer_.then([this, message] { link_.send(LinkType::kGroupRemoved, message); });
    return {};
  }
  group->life.enter(GroupPhase::kRemoving);
  starts_.forget(*group);
  group->cause = {group->id, group->epoch, 0, 1, StatusCode::kAborted, -1, "the group was removed"};
  for (const auto& member : group->members) {
    if (member->calls != nullptr) member->calls->halt();
  }
  finish_removals();
  return {};
}

void Groups::finish_removals() {
  std::erase_if(groups_, [this](const auto& entry) {
    Group& group = *entry.second;
    if (!group.life.is(GroupPhase::kRemoving) || !group.settled()) return false;
    for (const auto& member : group.members) end_member(*member);
    end_far(group);
    ranks_.unmap(group);
    // Sent only when nothing of the group is mapped here, see give_up_memory.
    reclaimer_.then([this, id = group.id] { link_.send(LinkType::kGroupRemoved, abi::GroupRef{id}); });
    return true;
  });
}

}  // namespace epd::engine
