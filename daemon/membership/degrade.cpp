// Groups that go on without a lost rank, and take it back. A rank comes or goes only in a recoverable break:
// while every engine stands still it is told what has changed, then all move to the next epoch.
#include "membership/registry.h"

#include <algorithm>

namespace epd::membership {
namespace {

// Sessions may wait for the same rank, and whoever comes first gets it; but each asks once.
Status check_not_asked_twice(const Group& group, const JoinRequest& request, std::size_t num_free) {
  const std::int32_t wanted = request.join.rank;
  const auto asked = std::count_if(group.waiting.begin(), group.waiting.end(), [&](const WaitingJoin& join) {
    return join.request.session_id == request.session_id && (wanted < 0 || join.request.join.rank == wanted);
  });
  if (static_cast<std::size_t>(asked) < (wanted < 0 ? num_free : 1)) return {};
  return invalid_argument("session " + std::to_string(request.session_id) + " waits for " +
                          (wanted < 0 ? std::to_string(asked) + " ranks" : "rank " + std::to_string(wanted)) +
                          " of group \"" + group.name + "\" already; allowed: to ask once for each of the " +
                          std::to_string(num_free) + " that are free");
}

}  // namespace

bool Group::lives(std::uint32_t rank) const {
  const auto member = members.find(rank);
  return member != members.end() && !member->second.gone();
}

bool Group::takes_ranks_back() const {
  return shape.policy == abi::LossPolicy::kDegrade && (is(GroupPhase::kActive) || is(GroupPhase::kBreaking));
}

std::uint32_t Group::num_lost() const {
  std::uint32_t lost = 0;
  for (std::uint32_t rank = 0; rank < shape.num_ranks; ++rank) lost += lives(rank) ? 0 : 1;
  return lost;
}

bool Group::needs(std::uint32_t device) const {
  return std::any_of(members.begin(), members.end(), [device](const auto& entry) {
    return !entry.second.gone() && entry.second.device == device;
  });
}

// The rank's kStopMember goes first: a stopped rank has no say in where the others go on.
void GroupRegistry::lose_rank(Group& group, Member& member, BreakReason reason) {
  stop_member(group, member);
  const auto slot = group.engines.find(member.device);
  if (slot != group.engines.end() && slot->second.is(EnginePhase::kAbsent) && !group.needs(member.device))
    group.engines.erase(slot);
  if (group.is(GroupPhase::kActive)) {
    begin_break(group, std::move(reason), {member.rank});
    return;
  }
  auto& breaking = std::get<Group::Breaking>(group.state);
  breaking.changed.insert(member.rank);
  const bool took_part = member.active_since <= group.epoch;
  if (took_part && group.reason.cause != StatusCode::kRankLost) {
    group.reason = std::move(reason);
    breaking.reason_changed = true;
  }
  advance(group);
}

// Whether it can be is known now, except for the quota; when, only if the group does not break just now.
Status GroupRegistry::rejoin(Group& group, const JoinRequest& request) {
  if (Status status = check_not_asked_twice(group, request, group.num_lost()); !status.ok()) return status;
  const std::uint32_t timeout_ms =
      request.join.timeout_ms != 0 ? request.join.timeout_ms : limits_.join_timeout_ms;
  group.waiting.push_back({request, due_in_ms(timeout_ms)});
  if (group.is(GroupPhase::kActive)) admit_waiting(group);
  return {};
}

// All that wait come in one break. One whose engine is down waits on: the others need not stop for it before
// it can be served.
void GroupRegistry::admit_waiting(Group& group) {
  std::vector<std::uint32_t> ranks;
  for (const WaitingJoin& join : std::exchange(group.waiting, {})) {
    if (!is_up(join.request.device)) {
      group.waiting.push_back(join);
      continue;
    }
    Result<std::uint32_t> rank = admit(group, join.request);
    if (rank.ok()) {
      group.members.at(*rank).join_due_ns = join.due_ns;
      ranks.push_back(*rank);
    } else {
      emit(ReplyRefused{join.request.session_id, join.request.request_id, rank.status()});
    }
  }
  if (ranks.empty()) return;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  text += ranks.size() == 1 ? " has rejoined" : " have rejoined";
  // Devices that are new to the group are told of it as it breaks.
  std::vector<std::uint32_t> new_devices;
  for (const std::uint32_t rank : ranks) {
    const std::uint32_t device = group.members.at(rank).device;
    if (group.engines.count(device) == 0) new_devices.push_back(device);
    group.engines[device];
  }
  begin_break(group, {StatusCode::kAborted, static_cast<std::int32_t>(ranks.front()), text},
              {ranks.begin(), ranks.end()});
  for (const std::uint32_t device : new_devices) tell_engine(group, device, group.engines.at(device));
}

Result<std::uint32_t> GroupRegistry::admit(Group& group, const JoinRequest& request) {
  Result<std::uint32_t> rank = pick_rank(group, request.join.rank);
  if (!rank.ok()) return rank.status();
  if (Status status = add_member(group, *rank, request); !status.ok()) return status;
  Member& member = group.members.at(*rank);
  member.presence = Presence::kJoining;
  member.active_since = group.epoch + 1;
  return *rank;
}

// Between the last kBroken and kResume. Engines without a living rank forget the group instead.
void GroupRegistry::tell_changes(Group& group, const std::set<std::uint32_t>& changed) {
  for (auto& [device, slot] : group.engines) {
    if (!slot.is(EnginePhase::kBroken)) continue;
    if (!group.needs(device)) {
      send_removal(group, device);
      continue;
    }
    for (const std::uint32_t rank : changed) {
      emit(SendRank{device, group.id, rank, group.lives(rank) ? group.members.at(rank).active_since : 0});
    }
  }
  for (const std::uint32_t rank : changed) {
    Member& member = group.members.at(rank);
    if (member.gone()) {
      end_membership(group, member);
      group.members.erase(rank);
      continue;
    }
    member.first_index = group.resume_index;
    member.announced = true;
    emit(SendMember{member.device, group.id, rank});
  }
}

void GroupRegistry::resumed(std::uint32_t device, const abi::Resumed& message) {
  EngineSlot* slot = slot_of(message.group_id, device);
  auto* serving = slot == nullptr ? nullptr : std::get_if<EngineSlot::Serving>(&slot->state);
  if (serving == nullptr) return;
  Group& group = groups_.at(message.group_id);
  if (message.epoch != group.epoch) return;
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
    if ((!all && member.device != device) || member.presence != Presence::kJoining) continue;
    member.presence = Presence::kHere;
    reply_joined(group, member);
  }
}

void GroupRegistry::expire_rejoins(Group& group) {
  const std::uint64_t now = clock_.now_ns();
  const std::string waits = group.waits();
  const Status status(StatusCode::kDeadlineExceeded, "group \"" + group.name +
                                                         "\" is still agreeing on who takes part" +
                                                         (waits.empty() ? ": an engine is silent" : waits));
  std::erase_if(group.waiting, [&](const WaitingJoin& join) {
    if (join.due_ns > now) return false;
    emit(ReplyRefused{join.request.session_id, join.request.request_id, status});
    return true;
  });
  std::vector<std::uint32_t> late;
  for (const auto& [rank, member] : group.members) {
    if (member.presence == Presence::kJoining && member.join_due_ns <= now) late.push_back(rank);
  }
  const std::uint64_t id = group.id;
  for (const std::uint32_t rank : late) {
    const Member& member = group.members.at(rank);
    emit(ReplyRefused{member.session_id, member.join_request, status});
    lose_member(id, rank, "did not rejoin in time");  // may forget the group
    if (groups_.count(id) == 0) return;
    if (!group.is(GroupPhase::kActive) && !group.is(GroupPhase::kBreaking)) return;
  }
}

// The group ends before they have come.
void GroupRegistry::refuse_joining(Group& group) {
  for (auto& [rank, member] : group.members) {
    if (member.presence != Presence::kJoining) continue;
    member.presence = Presence::kGone;
    emit(ReplyRefused{
        member.session_id, member.join_request,
        Status(StatusCode::kAborted, "group \"" + group.name + "\" has ended: " + group.reason.text)});
  }
}

// An engine is silent; the clients of the others need not wait for it to be told that they have failed.
void GroupRegistry::release_failed(Group& group) {
  for (auto& [device, slot] : group.engines) {
    auto* broken = std::get_if<EngineSlot::Broken>(&slot.state);
    if (broken == nullptr || std::exchange(broken->released, true)) continue;
    emit(SendRelease{device, {group.id}});
  }
}

// The engine has forgotten the group, or has died doing so. A rank that has come since is told to it anew.
void GroupRegistry::slot_free(Group& group, std::uint32_t device) {
  if (group.needs(device)) {
    EngineSlot& slot = group.engines.at(device) = {};
    tell_engine(group, device, slot);
  } else {
    group.engines.erase(device);
  }
  advance(group);
}

}  // namespace epd::membership
