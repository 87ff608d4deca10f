#include "membership/group.h"

#include "arrivals.h"

#include <algorithm>
#include <set>

namespace epd::membership {

const std::uint64_t* EngineSlot::due_ns() const {
  const auto due = [](const auto& of) -> const std::uint64_t* {
    if constexpr (requires { of.due_ns; }) return of.due_ns != 0 ? &of.due_ns : nullptr;
    return nullptr;
  };
  return std::visit(due, state);
}

StatusCode said_cause(StatusCode said, StatusCode otherwise) {
  switch (said) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
    case StatusCode::kVersionMismatch:
    case StatusCode::kResourceExhausted:
    case StatusCode::kUnsupported:
    case StatusCode::kDeadlineExceeded:
    case StatusCode::kRankLost:
    case StatusCode::kEngineRestarted:
    case StatusCode::kAborted:
    case StatusCode::kInternal: return said;
    default: return otherwise;
  }
}

bool Group::all_gone() const {
  return std::all_of(members.begin(), members.end(), [](const auto& entry) { return entry.second.gone(); });
}

bool Group::lives(std::uint32_t rank) const {
  const auto member = members.find(rank);
  return member != members.end() && !member->second.gone();
}

const Member* Group::holder(std::uint32_t rank) const {
  const auto arrival = arrivals.find(rank);
  if (arrival != arrivals.end()) return &arrival->second.member;
  return lives(rank) ? &members.at(rank) : nullptr;
}

bool Group::takes_ranks_back() const {
  return abi::degrades(shape.policy) && (is(GroupPhase::kActive) || is(GroupPhase::kBreaking));
}

std::uint32_t Group::num_lost() const {
  std::uint32_t lost = 0;
  for (std::uint32_t rank = 0; rank < shape.num_ranks; ++rank) lost += holder(rank) == nullptr ? 1 : 0;
  return lost;
}

std::string Group::waits() const {
  std::set<std::string> whom;  // engines may wait for the same one
  for (const auto& [engine, slot] : engines) {
    if (!slot.waits_for.empty()) whom.insert(slot.waits_for);
  }
  std::string text;
  for (const std::string& one : whom) text += "; " + one;
  return text;
}

bool Group::needs(EngineId engine) const {
  return std::any_of(members.begin(), members.end(), [engine](const auto& entry) {
    return !entry.second.gone() && entry.second.engine == engine;
  });
}

BreakReason Group::reason_of_end(EngineId engine, const std::string& text) const {
  std::vector<std::uint32_t> ranks;
  for (const auto& [rank, member] : members) {
    if (member.engine == engine && !member.gone()) ranks.push_back(rank);
  }
  return {StatusCode::kEngineRestarted, ranks.size() == 1 ? static_cast<std::int32_t>(ranks.front()) : -1,
          ranks_in_words(ranks) + ": " + text};
}

GroupDescription Group::describe() const {
  return {label(), shape, epoch, resume_index, view, epoch_key};
}

void Group::take(const GroupDescription& told) {
  id = told.label.id;
  uid = told.label.uid;
  name = told.label.name;
  shape = told.shape;
  epoch = told.epoch;
  resume_index = told.resume_index;
  view = told.view;
  epoch_key = told.epoch_key;
}

RankDescription Group::describe(std::uint32_t rank) const {
  const auto member = members.find(rank);
  if (member == members.end()) return {rank, {}, 0};
  return {rank, member->second.engine, member->second.active_since};
}

abi::GroupSettings Group::settings_on(EngineId engine) const {
  abi::GroupSettings settings{};
  settings.group_id = id;
  settings.priority = abi::kMinPriority;
  for (const auto& [rank, member] : members) {
    if (member.engine != engine) continue;
    settings.sms = std::max(settings.sms, member.sms);
    settings.priority = std::max(settings.priority, member.priority);
  }
  return settings;
}

MemberDescription describe(const Member& member) {
  return {member.rank, member.session, member.member, member.first_index};
}

}  // namespace epd::membership
