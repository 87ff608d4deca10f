#include "operator_commands.h"

#include "base/event.h"
#include "base/peer.h"
#include "fleet.h"
#include "live_config.h"
#include "losses.h"
#include "membership/deciders.h"
#include "reason.h"
#include "session/session_table.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace epd::supervisor {
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

constexpr std::string_view kById = "id:";  // no name has a colon

std::optional<std::uint64_t> id_in(std::string_view text) {
  std::uint64_t id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(id) : std::nullopt;
}

// Whether its name is free for the next group.
bool has_ended(const membership::Group& group) {
  using membership::GroupPhase;
  return group.is(GroupPhase::kFailing) || group.is(GroupPhase::kLost) || group.is(GroupPhase::kRemoving);
}

// Whether the engine has been told of the group, and not yet that the group is removed.
bool knows_group(const membership::EngineSlot& slot) {
  using membership::EnginePhase;
  return slot.is(EnginePhase::kStarting) || slot.is(EnginePhase::kServing) ||
         slot.is(EnginePhase::kBreaking) || slot.is(EnginePhase::kBroken);
}

Status no_rank(const membership::Group& group, std::uint32_t rank, const std::string& why) {
  return not_found("group " + std::to_string(group.id) + " (" + group.name + ") has no rank " +
                   std::to_string(rank) + " now" + (why.empty() ? "" : " (" + why + ")") +
                   "; allowed: a rank that epctl groups --members shows as here");
}

}  // namespace

// Root, and the user that the daemon runs as, could do all of it by other means.
Status OperatorCommands::authorize(const Operator& by, Right wanted, const std::string& what) {
  if (is_privileged(by.uid)) return {};
  Status status = rooms_.config.access()->may_operate({by.uid, by.gids}, wanted, what);
  if (status.ok()) return status;
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "operator refused",
                 {{"by_uid", by.uid}, {"by_pid", by.pid}, {"reason", status.message()}}, by.uid);
  return status;
}

Result<std::uint32_t> OperatorCommands::find_device(const std::string& name) const {
  std::string known;
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i) {
    if (rooms_.fleet[i].name() == name) return i;
    known += (i == 0 ? "" : ", ") + rooms_.fleet[i].name();
  }
  return not_found("device is \"" + name + "\"; allowed: " + known);
}

Status OperatorCommands::set_device(const Operator& by, const std::string& name,
                                    std::optional<std::uint32_t> sms) {
  Result<std::uint32_t> device = find_device(name);
  if (!device.ok()) return device.status();
  const std::uint32_t most = rooms_.fleet[*device].max_sms();
  if (most == 0) {
    return {StatusCode::kWouldBlock, name + " has no engine yet that could say how many SMs it has"};
  }
  if (sms) {
    if (Status status = check_range("sms", *sms, 1, most); !status.ok()) return status;
  }
  parts_.settings.set_sms(*device, sms);
  parts_.orders.send(*device, abi::LinkType::kSettings, parts_.settings.of_device(*device));
  record_event(EventKind::kSettingChanged, LogLevel::kInfo, "device set by the operator",
               {{"device", name},
                {"sms", sms ? std::to_string(*sms) : "as configured"},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  return {};
}

Status OperatorCommands::restart_device(const Operator& by, const std::string& name) {
  Result<std::uint32_t> device = find_device(name);
  if (!device.ok()) return device.status();
  if (!parts_.lifecycle.admitting().ok())
    return {
        StatusCode::kAborted,
        "the daemon is draining: operators restart no device any more; an engine that dies is started again"};
  record_event(EventKind::kSettingChanged, LogLevel::kWarning, "device restarted by the operator",
               {{"device", name}, {"by_uid", by.uid}, {"by_pid", by.pid}});
  rooms_.fleet[*device].restart("an operator (uid " + std::to_string(by.uid) + ") restarted it");
  return {};
}

Result<const membership::Group*> OperatorCommands::find_group(const std::string& text) const {
  std::vector<const membership::Group*> found;
  std::vector<const membership::Group*> ended;  // such a one counts only while no other has its name
  const membership::Group* of_id = nullptr;
  const bool by_id = text.starts_with(kById);
  const std::optional<std::uint64_t> id = id_in(by_id ? text.substr(kById.size()) : text);
  rooms_.deciders.each([&](const membership::Group& group) {
    if (group.id == id) {
      of_id = &group;
    } else if (!by_id && group.name == text) {
      (has_ended(group) ? ended : found).push_back(&group);
    }
  });
  if (found.empty()) found = std::move(ended);
  if (of_id != nullptr) found.push_back(of_id);
  if (found.size() == 1) return found.front();
  if (found.empty())
    return not_found("there is no group \"" + text +
                     "\"; allowed: a name or an id that epctl groups prints, or id:ID");
  std::string groups;
  for (const membership::Group* group : found) {
    groups += (groups.empty() ? "" : ", ") + std::string(kById) + std::to_string(group->id) + " (" +
              group->name + ", uid " + std::to_string(group->uid) + ")";
  }
  return invalid_argument("\"" + text + "\" means several groups; allowed: one of " + groups);
}

Result<membership::GroupLabel> OperatorCommands::set_group(const Operator& by, const std::string& name,
                                                           const GroupSettingsChange& change) {
  Result<const membership::Group*> found = find_group(name);
  if (!found.ok()) return found.status();
  const membership::Group& group = **found;
  if (!change.sms && !change.priority && !change.linger_us && !change.unset_sms && !change.unset_priority &&
      !change.unset_linger_us)
    return invalid_argument("nothing to set; allowed: sms, priority, linger_us");
  std::uint32_t most_sms = 0;
  for (const auto& [rank, member] : group.members)
    most_sms = std::max(most_sms, rooms_.fleet[member.engine.device].max_sms());
  if (change.sms) {
    if (Status status = check_range("sms", *change.sms, 0, most_sms); !status.ok()) return status;
  }
  if (change.priority) {
    Status status = check_range("priority", *change.priority, abi::kMinPriority, abi::kMaxPriority);
    if (!status.ok()) return status;
  }
  if (change.linger_us) {
    if (Status status = check_range("linger_us", *change.linger_us, 0, abi::kMaxLingerUs); !status.ok())
      return status;
    if (*change.linger_us != 0 && group.device_kind == abi::DeviceKind::kHost)
      return invalid_argument("linger_us is " + std::to_string(*change.linger_us) +
                              "; allowed: 0, since group " + std::to_string(group.id) + " (" + group.name +
                              ") is on host devices, which keep no SMs");
  }
  const membership::GroupLabel label = group.label();
  const GroupSettingsChange kept = parts_.settings.set_group(label.id, change);
  std::vector<std::pair<std::uint32_t, abi::GroupSettings>> told;  // devices, whose engines know the group
  for (const auto& [engine, slot] : group.engines) {
    if (knows_group(slot))
      told.emplace_back(engine.device, parts_.settings.of_group(group.settings_on(engine)));
  }
  for (const auto& [device, settings] : told)
    parts_.orders.send(device, abi::LinkType::kGroupSettings, settings);
  record_event(EventKind::kSettingChanged, LogLevel::kInfo, "group set by the operator",
               {{"group", label.id},
                {"name", label.name},
                {"sms", kept.sms ? std::to_string(*kept.sms) : "as joined"},
                {"priority", kept.priority ? std::to_string(*kept.priority) : "as joined"},
                {"linger_us", kept.linger_us ? std::to_string(*kept.linger_us) : "as configured"},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  return label;
}

Status OperatorCommands::evict_session(const Operator& by, std::uint64_t session_id,
                                       const std::string& reason) {
  if (Status status = check_reason(reason); !status.ok()) return status;
  const session::Session* session = rooms_.sessions.find(session_id);
  if (session == nullptr)
    return not_found("there is no session " + std::to_string(session_id) +
                     "; allowed: one that epctl sessions prints");
  record_event(EventKind::kEvicted, LogLevel::kWarning, "session evicted by the operator",
               {{"session", session_id},
                {"pid", session->peer.pid},
                {"reason", reason},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  parts_.gpu_work.expel(*session, {StatusCode::kAborted, with_reason("evicted by operator", reason)});
  return {};
}

Result<membership::GroupLabel> OperatorCommands::evict_rank(const Operator& by, const std::string& name,
                                                            std::uint32_t rank, const std::string& reason) {
  if (Status status = check_reason(reason); !status.ok()) return status;
  Result<const membership::Group*> found = find_group(name);
  if (!found.ok()) return found.status();
  const membership::Group& group = **found;
  const auto here = group.members.find(rank);
  if (here == group.members.end()) return no_rank(group, rank, "");
  const membership::Member member = here->second;
  if (member.gone()) return no_rank(group, rank, member.evicted);
  const membership::GroupLabel label = group.label();
  const bool formed = !group.engines.empty();  // else its members are not lost
  const std::string how = with_reason("was evicted by operator", reason);
  if (Status status = rooms_.deciders.evict({label.id, rank, how}); !status.ok()) return status;
  record_event(EventKind::kEvicted, LogLevel::kWarning, "rank evicted by the operator",
               {{"group", label.id},
                {"name", label.name},
                {"rank", rank},
                {"session", member.session.number},
                {"pid", member.pid},
                {"reason", reason},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  if (formed) record_loss(label, member, how);
  parts_.orders.carry_out_all();
  return label;
}

}  // namespace epd::supervisor
