// What an operator may change: settings of devices and groups, who stays, engines that start anew.
#include "base/event.h"
#include "node.h"
#include "reason.h"

#include <unistd.h>
#include <algorithm>
#include <charconv>

namespace epd {
namespace {

std::string range(std::int64_t low, std::int64_t high) {
  return std::to_string(low) + ".." + std::to_string(high);
}

Status check_range(const char* what, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(std::string(what) + " is " + std::to_string(value) +
                          "; allowed: " + range(low, high));
}

std::string with_reason(const std::string& what, const std::string& reason) {
  return reason.empty() ? what : what + ": " + reason;
}

bool has_ended(const membership::Group& group) {
  return group.phase == membership::GroupPhase::kLost || group.phase == membership::GroupPhase::kRemoving;
}

// It has been told of the group and not yet that the group is removed.
bool knows_group(const membership::EngineSlot& slot) {
  return slot.phase == membership::EnginePhase::kStarting ||
         slot.phase == membership::EnginePhase::kServing ||
         slot.phase == membership::EnginePhase::kBreaking || slot.phase == membership::EnginePhase::kBroken;
}

}  // namespace

// Root, and whoever the daemon runs as, could do all of it by other means.
Status Node::authorize(const Operator& by, Right wanted, const std::string& what) {
  if (by.uid == 0 || by.uid == ::geteuid()) return {};
  std::shared_ptr<const AccessPolicy> access;
  {
    const std::lock_guard lock(access_mutex_);
    access = access_;
  }
  Status status = access->may_operate({by.uid, by.gids}, wanted, what);
  if (status.ok()) return status;
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "operator refused",
                 {{"by_uid", by.uid}, {"by_pid", by.pid}, {"reason", status.message()}}, by.uid);
  return status;
}

Result<std::uint32_t> Node::find_device(const std::string& name) const {
  std::string known;
  for (std::uint32_t i = 0; i < fleet_->size(); ++i) {
    if (fleet_->name(i) == name) return i;
    known += (i == 0 ? "" : ", ") + fleet_->name(i);
  }
  return not_found("device is \"" + name + "\"; allowed: " + known);
}

Status Node::set_device(const Operator& by, const std::string& name, std::uint32_t sms) {
  Result<std::uint32_t> device = find_device(name);
  if (!device.ok()) return device.status();
  const std::uint32_t most = fleet_->max_sms(*device);
  if (most == 0) {
    return {StatusCode::kWouldBlock, name + " has no engine yet that could say how many SMs it has"};
  }
  if (Status status = check_range("sms", sms, 1, most); !status.ok()) return status;
  device_sms_[*device] = sms;
  send(*device, abi::LinkType::kSettings, settings(*device));
  record_event(EventKind::kSettingChanged, LogLevel::kInfo, "device set by the operator",
               {{"device", name}, {"sms", sms}, {"by_uid", by.uid}, {"by_pid", by.pid}});
  return {};
}

Status Node::restart_device(const Operator& by, const std::string& name) {
  Result<std::uint32_t> device = find_device(name);
  if (!device.ok()) return device.status();
  if (phase_ == Phase::kDraining || phase_ == Phase::kStopping)
    return {StatusCode::kAborted, "the daemon is draining: no engine is started again"};
  record_event(EventKind::kSettingChanged, LogLevel::kWarning, "device restarted by the operator",
               {{"device", name}, {"by_uid", by.uid}, {"by_pid", by.pid}});
  fleet_->restart(*device, "an operator (uid " + std::to_string(by.uid) + ") restarted it");
  return {};
}

Result<std::uint64_t> Node::find_group(const std::string& name) const {
  const auto& groups = registry_.groups();
  std::uint64_t id = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), id);
  if (error == std::errc() && end == name.data() + name.size() && groups.contains(id)) return id;
  std::vector<std::uint64_t> found;
  for (const auto& [group_id, group] : groups) {
    if (group.name == name && !has_ended(group)) found.push_back(group_id);
  }
  if (found.size() == 1) return found.front();
  if (found.empty())
    return not_found("there is no group \"" + name + "\"; allowed: a name or an id that epctl groups prints");
  std::string ids;
  for (const std::uint64_t candidate : found) ids += (ids.empty() ? "" : ", ") + std::to_string(candidate);
  return invalid_argument("group \"" + name + "\" is a name of several users; allowed: one of the ids " +
                          ids);
}

Status Node::set_group(const Operator& by, const std::string& name, const GroupSettingsChange& change) {
  const Result<std::uint64_t> id = find_group(name);
  if (!id.ok()) return id.status();
  const membership::Group& group = registry_.groups().at(id.value());
  if (!change.sms && !change.priority) return invalid_argument("nothing to set; allowed: sms, priority");
  std::uint32_t most_sms = 0;
  for (const auto& [rank, member] : group.members)
    most_sms = std::max(most_sms, fleet_->max_sms(member.device));
  if (change.sms) {
    if (Status status = check_range("sms", *change.sms, 0, most_sms); !status.ok()) return status;
  }
  if (change.priority) {
    Status status = check_range("priority", *change.priority, abi::kMinPriority, abi::kMaxPriority);
    if (!status.ok()) return status;
  }
  std::erase_if(group_settings_,
                [this](const auto& entry) { return !registry_.groups().contains(entry.first); });
  GroupSettingsChange& kept = group_settings_[group.id];
  if (change.sms) kept.sms = change.sms;
  if (change.priority) kept.priority = change.priority;
  carry_out_actions();  // an engine may be about to be told of the group
  for (const auto& [device, slot] : group.engines) {
    if (knows_group(slot)) send(device, abi::LinkType::kGroupSettings, group_settings(group, device));
  }
  record_event(EventKind::kSettingChanged, LogLevel::kInfo, "group set by the operator",
               {{"group", group.id},
                {"name", group.name},
                {"sms", kept.sms ? std::to_string(*kept.sms) : "as joined"},
                {"priority", kept.priority ? std::to_string(*kept.priority) : "as joined"},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  return {};
}

abi::GroupSettings Node::group_settings(const membership::Group& group, std::uint32_t device) const {
  abi::GroupSettings settings{group.id, group.sms_on(device), group.priority_on(device)};
  const auto found = group_settings_.find(group.id);
  if (found == group_settings_.end()) return settings;
  if (found->second.sms) settings.sms = *found->second.sms;
  if (found->second.priority) settings.priority = *found->second.priority;
  return settings;
}

Status Node::evict_session(const Operator& by, std::uint64_t session_id, const std::string& reason) {
  if (Status status = check_reason(reason); !status.ok()) return status;
  const Session* session = sessions_->find(session_id);
  if (session == nullptr)
    return not_found("there is no session " + std::to_string(session_id) +
                     "; allowed: one that epctl sessions prints");
  record_event(EventKind::kEvicted, LogLevel::kWarning, "session evicted by the operator",
               {{"session", session_id},
                {"pid", session->peer.pid},
                {"reason", reason},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  expel(*session, {StatusCode::kAborted, with_reason("evicted by operator", reason)});
  return {};
}

Status Node::evict_rank(const Operator& by, const std::string& name, std::uint32_t rank,
                        const std::string& reason) {
  if (Status status = check_reason(reason); !status.ok()) return status;
  const Result<std::uint64_t> id = find_group(name);
  if (!id.ok()) return id.status();
  const membership::Group& group = registry_.groups().at(id.value());
  const auto member = group.members.find(rank);
  if (member == group.members.end() || member->second.gone) {
    return not_found("group " + std::to_string(group.id) + " (" + group.name + ") has no rank " +
                     std::to_string(rank) +
                     " now; allowed: a rank that epctl groups --members shows as here");
  }
  const std::string how = with_reason("was evicted by operator", reason);
  record_event(EventKind::kEvicted, LogLevel::kWarning, "rank evicted by the operator",
               {{"group", group.id},
                {"rank", rank},
                {"session", member->second.session_id},
                {"pid", member->second.pid},
                {"reason", reason},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  record_losses(member->second.session_id, member->second.member, how);
  registry_.evict(group.id, rank, how);
  carry_out_actions();
  return {};
}

// Before the registry is told, so that the loss stands before the break that it causes.
void Node::record_losses(std::uint64_t session_id, std::optional<std::uint32_t> member_id,
                         const std::string& how) const {
  for (const auto& [id, group] : registry_.groups()) {
    // Nobody leaves by name what it has not joined yet.
    if (member_id && group.engines.empty()) continue;
    for (const auto& [rank, member] : group.members) {
      if (member.session_id != session_id || member.gone) continue;
      if (member_id && member.member != *member_id) continue;
      record_of_user(group.uid, EventKind::kRankLost, LogLevel::kInfo, "rank lost",
                     {{"group", id},
                      {"name", group.name},
                      {"rank", rank},
                      {"session", session_id},
                      {"pid", member.pid},
                      {"how", how}});
    }
  }
}

}  // namespace epd
