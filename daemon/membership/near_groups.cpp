#include "membership/near_groups.h"

#include <algorithm>
#include <utility>

namespace epd::membership {

namespace {

EngineId here(EngineId engine) {
  return {kLocalNode, engine.device};
}

// 0: the message is about none, or about several.
template <typename T>
std::uint64_t group_of(const T& message) {
  if constexpr (requires { message.message.group_id; }) return message.message.group_id;
  if constexpr (requires { message.group_id; }) return message.group_id;
  if constexpr (requires { message.group.label.id; }) return message.group.label.id;
  return 0;
}

}  // namespace

// ---- one group

bool NearGroup::is_steady() const {
  const auto fine = [this](const auto& entry) {
    const Member& member = entry.second;
    return member.presence == Presence::kHere && member.announced &&
           std::holds_alternative<Member::Taken>(member.calls) && engines.contains(member.engine);
  };
  return started && !failed && !asks_break && std::all_of(members.begin(), members.end(), fine) &&
         std::all_of(engines.begin(), engines.end(),
                     [](const auto& entry) { return entry.second.is(EnginePhase::kServing); });
}

bool NearGroup::starts() const {
  return std::any_of(engines.begin(), engines.end(), [this](const auto& entry) {
    return entry.second.is(EnginePhase::kStarting) && !starts_broken.contains(entry.first.device);
  });
}

void NearGroup::update_phase() {
  const auto any = [this](EnginePhase phase) {
    return std::any_of(engines.begin(), engines.end(),
                       [&](const auto& entry) { return entry.second.is(phase); });
  };
  const bool serves = std::all_of(engines.begin(), engines.end(),
                                  [](const auto& entry) { return entry.second.is(EnginePhase::kServing); });
  if (!started) {
    state = Forming{};
  } else if (any(EnginePhase::kRemoving)) {
    state = Removing{};
  } else if (failed && (any(EnginePhase::kBreaking) || any(EnginePhase::kServing))) {
    state = Failing{};
  } else if (failed) {
    state = Lost{};
  } else if (starts()) {
    state = Starting{};
  } else if (serves) {
    state = Active{};
  } else {
    state = Breaking{};
  }
}

const FarEngine* NearGroup::far_engine_of(std::uint32_t rank) const {
  if (rank >= ranks.size() || ranks[rank].active_since == 0) return nullptr;
  const auto found = std::find_if(far_engines.begin(), far_engines.end(),
                                  [&](const FarEngine& far) { return far.engine == ranks[rank].engine; });
  return found == far_engines.end() ? nullptr : &*found;
}

bool NearGroup::has_member(std::uint64_t session, std::uint32_t number) const {
  return std::any_of(members.begin(), members.end(), [&](const auto& entry) {
    return entry.second.session.number == session && entry.second.member == number;
  });
}

Group NearGroup::to_end() && {
  // Joins without an answer are said again to another coordinator.
  for (auto& [rank, member] : members) {
    if (member.presence == Presence::kJoining) member.presence = Presence::kGone;
  }
  state = Active{};
  if (starts()) state = Starting{};
  return std::move(*this);
}

// ---- all

std::vector<GroupReport> NearGroups::steady() const {
  std::vector<GroupReport> reports;
  for (const auto& [id, group] : groups_) {
    if (!group.is_steady()) continue;
    GroupReport report{group.describe(), group.asked_sum_ranks, {}};
    report.told.ranks = group.ranks;
    for (const auto& [rank, m] : group.members)
      report.ranks.push_back({rank, m.engine.device, m.session.number, m.member, m.uid, m.pid, m.sms,
                              m.priority, m.join_request, m.active_since, m.first_index});
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<ReleaseMemory> NearGroups::take_unannounced() {
  std::vector<ReleaseMemory> taken;
  for (const auto& [id, group] : groups_) {
    for (const auto& [rank, member] : group.members) {
      const bool unknown = !member.announced && (member.presence == Presence::kJoining || !group.started);
      if (unknown) taken.push_back({member.engine, id, rank});
    }
  }
  for (const ReleaseMemory& of : taken) follow(of);
  return taken;
}

NearGroup* NearGroups::find(std::uint64_t group_id) {
  const auto found = groups_.find(group_id);
  return found == groups_.end() ? nullptr : &found->second;
}

EngineSlot* NearGroups::find_slot(std::uint64_t group_id, EngineId engine) {
  NearGroup* group = find(group_id);
  if (group == nullptr) return nullptr;
  const auto slot = group->engines.find(here(engine));
  return slot == group->engines.end() ? nullptr : &slot->second;
}

Member* NearGroups::find_member(std::uint64_t group_id, std::uint32_t rank) {
  NearGroup* group = find(group_id);
  if (group == nullptr) return nullptr;
  const auto member = group->members.find(rank);
  return member == group->members.end() ? nullptr : &member->second;
}

// An engine that is down and serves no rank here; a group of which nothing is left.
void NearGroups::forget_unused(std::uint64_t group_id) {
  NearGroup* group = find(group_id);
  if (group == nullptr) return;
  std::erase_if(group->engines, [group](const auto& entry) {
    return entry.second.is(EnginePhase::kAbsent) &&
           std::none_of(group->members.begin(), group->members.end(),
                        [&entry](const auto& of_rank) { return of_rank.second.engine == entry.first; });
  });
  if (group->members.empty() && group->engines.empty()) groups_.erase(group_id);
}

void NearGroups::keep_boards(const std::vector<BoardIndex>& boards) {
  for (const BoardIndex& board : boards) {
    Member* member = find_member(board.group_id, board.rank);
    if (member != nullptr) member->board_index = board.next_index;
  }
}

template <typename T>
void NearGroups::take(const T& message) {
  follow(message);
  if (NearGroup* group = find(group_of(message)); group != nullptr) group->update_phase();
}

// ---- decided

void NearGroups::decided(const Action& action, const JoinRequest* request, std::uint64_t now_ns) {
  const auto* wanted = std::get_if<AcquireMemory>(&action);
  if (wanted == nullptr) {
    std::visit([this](const auto& what) { take(what); }, action);
    return;
  }
  const auto [entry, is_new] = groups_.try_emplace(wanted->group_id);
  NearGroup& group = entry->second;
  if (is_new) group.created_ns = now_ns;
  group.id = wanted->group_id;
  Member& member = group.members[wanted->rank];
  member = Member{};
  member.rank = wanted->rank;
  member.session.number = wanted->request.session.number;
  member.join_request = wanted->request.number;
  member.uid = wanted->uid;
  member.engine = here(wanted->engine);
  member.presence = Presence::kJoining;
  if (request == nullptr) return;
  member.pid = request->pid;
  member.sms = request->join.sms;
  member.priority = request->join.priority;
  group.asked_sum_ranks = request->join.shape.sum_ranks;
}

void NearGroups::follow(const StartGroup& action) {
  NearGroup& group = groups_[action.group.label.id];
  group.started = true;
  group.take(action.group);
  group.ranks = action.group.ranks;
  group.far_engines = action.group.far_engines;
  group.engines[here(action.engine)] = {EngineSlot::Starting{}, 0, {}, 0};
  group.starts_broken.erase(action.engine.device);
  if (action.broken) group.starts_broken.insert(action.engine.device);
  for (const MemberDescription& told : action.group.members)
    follow(SendMember{action.engine, group.id, told});
}

void NearGroups::follow(const SendMember& action) {
  Member* member = find_member(action.group_id, action.member.rank);
  if (member == nullptr) return;
  member->announced = true;
  member->member = action.member.member;
  member->first_index = action.member.first_index;
  const std::vector<RankDescription>& ranks = find(action.group_id)->ranks;
  if (action.member.rank < ranks.size()) member->active_since = ranks[action.member.rank].active_since;
}

void NearGroups::follow(const SendRank& action) {
  NearGroup* group = find(action.group_id);
  if (group != nullptr && action.rank.rank < group->ranks.size())
    group->ranks[action.rank.rank] = action.rank;
}

// It names no group: all that its engine serves may have ranks there.
void NearGroups::follow(const SendFarEngine& action) {
  for (auto& [id, group] : groups_) {
    if (!group.engines.contains(here(action.engine))) continue;
    std::erase_if(group.far_engines, [&](const FarEngine& far) { return far.engine == action.far.engine; });
    group.far_engines.push_back(action.far);
  }
}

void NearGroups::follow(const SendStopMember& action) {
  Member* member = find_member(action.message.group_id, action.message.rank);
  if (member != nullptr) member->calls = Member::Stopping{};
}

void NearGroups::follow(const SendBreak& action) {
  EngineSlot* slot = find_slot(action.message.group_id, action.engine);
  if (slot == nullptr) return;
  slot->state = EngineSlot::Breaking{0, action.message.fatal != 0};
  slot->waits_for.clear();
  NearGroup& group = *find(action.message.group_id);
  group.asks_break = false;
  group.pair_lost_ns.reset();
  if (action.message.fatal != 0) group.failed = true;
  const std::string text(action.message.text, abi::text_length(action.message.text));
  group.reason = {action.message.cause, action.message.failed_rank, text, action.orderly};
}

void NearGroups::follow(const SendResume& action) {
  EngineSlot* slot = find_slot(action.message.group_id, action.engine);
  if (slot == nullptr) return;
  slot->state = EngineSlot::Serving{};
  slot->waits_for.clear();
  NearGroup& group = *find(action.message.group_id);
  if (action.message.cause != StatusCode::kOk) {
    const std::string text(action.message.text, abi::text_length(action.message.text));
    group.reason = {action.message.cause, action.message.failed_rank, text};
  }
  std::erase_if(group.far_engines, [&group](const FarEngine& far) {
    return std::none_of(group.ranks.begin(), group.ranks.end(), [&far](const RankDescription& rank) {
      return rank.active_since != 0 && rank.engine == far.engine;
    });
  });
  group.epoch = action.message.epoch;
  group.resume_index = action.message.resume_index;
  group.view = action.message.view;
  group.epoch_key = action.epoch_key;
}

void NearGroups::follow(const SendRemoveGroup& action) {
  EngineSlot* slot = find_slot(action.message.group_id, action.engine);
  if (slot != nullptr) slot->state = EngineSlot::Removing{};
}

void NearGroups::follow(const ReleaseMemory& action) {
  NearGroup* group = find(action.group_id);
  if (group == nullptr) return;
  group->members.erase(action.rank);
  forget_unused(action.group_id);
}

void NearGroups::follow(const ReplyJoined& action) {
  Member* member = find_member(action.message.group_id, action.message.rank);
  if (member != nullptr && member->presence == Presence::kJoining) member->presence = Presence::kHere;
}

// No engine will serve it.
void NearGroups::follow(const MarkLost& action) {
  if (Member* member = find_member(action.group_id, action.rank); member != nullptr)
    member->evicted = action.text.empty() ? "lost" : action.text;
}
void NearGroups::follow(const ReplyLeft& action) {
  for (auto& [id, group] : groups_) {
    for (auto& [rank, member] : group.members) {
      if (member.session.number == action.request.session.number && member.member == action.message.member)
        member.presence = Presence::kGone;
    }
  }
}

// ---- said

void NearGroups::said(const Event& event, std::uint64_t now_ns) {
  if (const auto* lost = std::get_if<PeerLost>(&event)) return follow(*lost, now_ns);
  std::visit([this](const auto& what) { take(what); }, event);
}

void NearGroups::follow(const MemoryAcquired& event) {
  Member* member = find_member(event.group_id, event.rank);
  if (member == nullptr || member->join_id().number != event.request.number) return;
  member->holds_memory = event.status.ok();
  if (event.status.ok()) return;
  find(event.group_id)->members.erase(event.rank);
  forget_unused(event.group_id);
}

void NearGroups::follow(const SessionClosed& event) {
  for (auto& [id, group] : groups_) {
    for (auto& [rank, member] : group.members) {
      if (member.session.number == event.session.number) member.presence = Presence::kGone;
    }
  }
}

void NearGroups::follow(const EngineDown& event) {
  keep_boards(event.boards);
  for (auto& [id, group] : groups_) {
    const auto slot = group.engines.find(here(event.engine));
    if (slot == group.engines.end()) continue;
    const bool removing = slot->second.is(EnginePhase::kRemoving);
    slot->second = EngineSlot{};
    if (removing) group.engines.erase(slot);
    for (auto& [rank, member] : group.members) {
      if (member.engine.device == event.engine.device) member.announced = false;
    }
    group.update_phase();
  }
  std::vector<std::uint64_t> ids;
  for (const auto& [id, group] : groups_) ids.push_back(id);
  for (const std::uint64_t id : ids) forget_unused(id);
}

void NearGroups::follow(const GroupReady& event) {
  EngineSlot* slot = find_slot(event.message.group_id, event.engine);
  if (slot == nullptr || !slot->is(EnginePhase::kStarting)) return;
  slot->waits_for.clear();
  keep_boards(event.boards);
  const bool amid_break = find(event.message.group_id)->starts_broken.contains(event.engine.device);
  slot->state = EngineSlot::Broken{};
  if (event.message.status == StatusCode::kOk && !amid_break) slot->state = EngineSlot::Serving{};
}

void NearGroups::follow(const GroupWaits& event) {
  EngineSlot* slot = find_slot(event.message.group_id, event.engine);
  const bool owes = slot != nullptr && (slot->is(EnginePhase::kStarting) || slot->is(EnginePhase::kServing));
  if (owes) slot->waits_for.assign(event.message.text, abi::text_length(event.message.text));
}

void NearGroups::follow(const Resumed& event) {
  EngineSlot* slot = find_slot(event.message.group_id, event.engine);
  if (slot != nullptr) slot->waits_for.clear();
}

void NearGroups::follow(const MemberStopped& event) {
  Member* member = find_member(event.message.group_id, event.message.rank);
  if (member != nullptr) member->calls = Member::Stopped{event.message.next_submit};
}

void NearGroups::follow(const BreakRequested& event) {
  NearGroup* group = find(event.message.group_id);
  if (group != nullptr && group->epoch == event.message.epoch) group->asks_break = true;
}

void NearGroups::follow(const PeerLost& event, std::uint64_t now_ns) {
  for (auto& [id, group] : groups_) {
    const bool shared = group.engines.contains(here(event.engine)) &&
                        std::any_of(group.far_engines.begin(), group.far_engines.end(),
                                    [&event](const FarEngine& far) { return far.engine == event.far; });
    if (shared) group.pair_lost_ns = now_ns;
  }
}

void NearGroups::follow(const Broken& event) {
  EngineSlot* slot = find_slot(event.message.group_id, event.engine);
  const auto* breaking = slot == nullptr ? nullptr : std::get_if<EngineSlot::Breaking>(&slot->state);
  if (breaking != nullptr) slot->state = EngineSlot::Broken{event.message.next_index, false, breaking->fatal};
}

void NearGroups::follow(const GroupRemoved& event) {
  EngineSlot* slot = find_slot(event.message.group_id, event.engine);
  if (slot == nullptr || !slot->is(EnginePhase::kRemoving)) return;
  find(event.message.group_id)->engines.erase(here(event.engine));
  forget_unused(event.message.group_id);
}

}  // namespace epd::membership
