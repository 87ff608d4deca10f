#include "membership/group.h"

#include "forming.h"
#include "proto/shape_rules.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

namespace epd::membership {

// ---- group

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

// ---- join rules

namespace {

constexpr std::uint32_t kMaxCudaRanks = 32;  // kernels::kMaxRanks

}  // namespace

Status check_group_name(std::string_view name) {
  if (name.empty() || name.size() > abi::kMaxGroupName) {
    return invalid_argument("group name has " + std::to_string(name.size()) + " characters; allowed: 1.." +
                            std::to_string(abi::kMaxGroupName));
  }
  for (const char c : name) {
    const bool fine = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                      c == '.' || c == '_' || c == '-';
    if (!fine) {
      return invalid_argument("group name holds character code " +
                              std::to_string(static_cast<unsigned char>(c)) + "; allowed: [A-Za-z0-9._-]");
    }
  }
  return {};
}

Status check_span(abi::Span span, bool spanning) {
  if ((span == abi::Span::kCluster) == spanning) return {};
  if (spanning)
    return {StatusCode::kUnsupported, "span is 0 (node); allowed: 1 (cluster) in groups that span nodes"};
  return {StatusCode::kUnsupported,
          "span is 1 (cluster); allowed: 0 (node), unless the daemon's configuration has [cluster]"};
}

Status check_join(const abi::Join& join) {
  const std::string_view name(join.group, abi::text_length(join.group));
  if (Status status = check_group_name(name); !status.ok()) return status;
  const abi::GroupShape& s = join.shape;
  if (std::string wrong = abi::check_shape(s); !wrong.empty()) return invalid_argument(std::move(wrong));
  if (join.rank < -1 || join.rank >= static_cast<std::int32_t>(s.num_ranks)) {
    return invalid_argument("rank is " + std::to_string(join.rank) + "; allowed: 0.." +
                            std::to_string(s.num_ranks - 1) + ", or -1 for any");
  }
  if (join.restores != 0 &&
      (join.rank < 0 || s.span != abi::Span::kNode || s.policy != abi::LossPolicy::kDegradeLate))
    return {StatusCode::kUnsupported,
            "late ranks come back to groups of one node, with policy degrade_late; allowed: restores 0"};
  if (join.priority < abi::kMinPriority || join.priority > abi::kMaxPriority) {
    return invalid_argument("priority is " + std::to_string(join.priority) + "; allowed: " +
                            std::to_string(abi::kMinPriority) + " .. " + std::to_string(abi::kMaxPriority));
  }
  return {};
}

Status check_device(abi::DeviceKind kind, const abi::GroupShape& shape) {
  if (kind == abi::DeviceKind::kHost) return {};
  if (kind != abi::DeviceKind::kCuda)
    return invalid_argument("device kind is " + std::to_string(static_cast<std::uint32_t>(kind)) +
                            "; allowed: 0 (host), 1 (CUDA)");
  if (shape.span == abi::Span::kCluster)
    return {
        StatusCode::kUnsupported,
        "span is 1 (cluster); allowed: 0 (node) on CUDA devices: groups that span nodes are on host devices"};
  if (shape.num_ranks > kMaxCudaRanks)
    return {StatusCode::kUnsupported, "num_ranks is " + std::to_string(shape.num_ranks) +
                                          "; allowed: at most " + std::to_string(kMaxCudaRanks) +
                                          " on CUDA devices"};
  if (!shape.sums_all_ranks())
    return {StatusCode::kUnsupported, "sum_ranks is " + std::to_string(shape.sum_ranks) +
                                          "; allowed: num_ranks, which is " +
                                          std::to_string(shape.num_ranks) +
                                          ", or 0 on CUDA devices: smaller sum domains follow there later"};
  return {};
}

Status check_same_kind(abi::DeviceKind first, abi::DeviceKind joiner, const std::string& group) {
  if (first == joiner) return {};
  const auto name = [](abi::DeviceKind kind) { return kind == abi::DeviceKind::kCuda ? "CUDA" : "host"; };
  return invalid_argument(std::string("this session is on a ") + name(joiner) +
                          " device, but the ranks already in group \"" + group + "\" are on " + name(first) +
                          " devices");
}

Status check_same_shape(const abi::GroupShape& first, const abi::GroupShape& joiner,
                        const std::string& group) {
  const abi::ShapeField* field = abi::first_difference(first, joiner);
  if (field == nullptr) return {};
  return invalid_argument(std::string(field->name) + " is " + std::to_string(field->value(joiner)) +
                          ", but the ranks already in group \"" + group + "\" have " +
                          std::to_string(field->value(first)));
}

}  // namespace epd::membership
