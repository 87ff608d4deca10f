#include "supervisor/access_policy.h"

#include <fnmatch.h>
#include <algorithm>
#include <array>

namespace epd::supervisor {
namespace {

bool contains(const std::vector<std::uint32_t>& list, std::uint32_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

bool is_about(const AccessRule& rule, const Caller& caller) {
  if (rule.users.empty() && rule.unix_groups.empty()) return true;
  return contains(rule.users, caller.uid) ||
         std::any_of(caller.gids.begin(), caller.gids.end(),
                     [&](std::uint32_t gid) { return contains(rule.unix_groups, gid); });
}

}  // namespace

const AccessRule* AccessPolicy::rule_for(const Caller& caller) const {
  const auto found = std::find_if(rules_.begin(), rules_.end(),
                                  [&](const AccessRule& rule) { return is_about(rule, caller); });
  return found == rules_.end() ? nullptr : &*found;
}

std::string AccessPolicy::number_of(const AccessRule& rule) const {
  return "access.rule " + std::to_string(&rule - rules_.data() + 1);
}

std::string AccessPolicy::name_of(std::uint32_t uid) const {
  const auto found = names_.find(uid);
  return "user " + std::to_string(uid) + (found == names_.end() ? "" : " (" + found->second + ")");
}

Status AccessPolicy::may_attach(const Caller& caller) const {
  const AccessRule* rule = rule_for(caller);
  if (rule == nullptr ? defaults_.attach : rule->attach) return {};
  return {StatusCode::kPermissionDenied,
          name_of(caller.uid) + " may not attach: " +
              (rule == nullptr ? "no access.rule is about it and access.default is \"deny\""
                               : number_of(*rule) + " says attach = false")};
}

Status AccessPolicy::check_list(const Caller& caller, const std::string& asked, const std::string& name,
                                std::vector<std::string> AccessRule::*list) const {
  if (Status status = may_attach(caller); !status.ok()) return status;
  const AccessRule* rule = rule_for(caller);
  if (rule == nullptr || (rule->*list).empty()) return {};
  std::string allowed;
  for (const std::string& pattern : rule->*list) {
    if (::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0) return {};
    allowed += (allowed.empty() ? "\"" : ", \"") + pattern + "\"";
  }
  return {StatusCode::kPermissionDenied, name_of(caller.uid) + " may not " + asked + " \"" + name +
                                             "\": " + number_of(*rule) + " allows " + allowed};
}

Status AccessPolicy::may_use_device(const Caller& caller, const std::string& device) const {
  return check_list(caller, "use device", device, &AccessRule::devices);
}

Status AccessPolicy::may_join(const Caller& caller, const std::string& group) const {
  return check_list(caller, "join group", group, &AccessRule::groups);
}

Status AccessPolicy::may_take_priority(const Caller& caller, std::int32_t priority) const {
  const AccessRule* rule = rule_for(caller);
  const bool by_rule = rule != nullptr && rule->max_priority;
  const std::int32_t highest = by_rule ? *rule->max_priority : defaults_.max_priority;
  if (priority <= highest) return {};
  return {StatusCode::kPermissionDenied,
          name_of(caller.uid) + " may not join with priority " + std::to_string(priority) + ": " +
              (by_rule ? number_of(*rule) + " says max_priority = " : "limits.max_priority is ") +
              std::to_string(highest)};
}

Status AccessPolicy::may_operate(const Caller& caller, Right wanted, const std::string& what) const {
  constexpr std::array<const char*, 3> kWords = {"none", "read", "change"};
  const AccessRule* rule = rule_for(caller);
  const bool by_rule = rule != nullptr && rule->operate;
  const Right given = by_rule ? *rule->operate : defaults_.operate;
  if (given >= wanted) return {};
  const std::string word = kWords[static_cast<std::size_t>(given)];
  return {StatusCode::kPermissionDenied,
          name_of(caller.uid) + " may not " + what + ": " +
              (by_rule ? number_of(*rule) + " says operate = \"" + word + "\""
                       : "no access.rule gives it more, and access.operate is \"" + word + "\"") +
              "; needed: \"" + kWords[static_cast<std::size_t>(wanted)] + "\""};
}

Quota AccessPolicy::quota(const Caller& caller, std::optional<std::uint64_t> AccessRule::*limit,
                          Quota general) const {
  const AccessRule* rule = rule_for(caller);
  if (rule == nullptr || !(rule->*limit)) return general;
  return {*(rule->*limit), number_of(*rule)};
}

Quota AccessPolicy::max_sessions(const Caller& caller, Quota general) const {
  return quota(caller, &AccessRule::max_sessions, std::move(general));
}

Quota AccessPolicy::max_groups(const Caller& caller, Quota general) const {
  return quota(caller, &AccessRule::max_groups, std::move(general));
}

Quota AccessPolicy::most_groups(std::uint32_t uid, Quota general) const {
  const std::vector<std::uint32_t> unknown;
  const Caller caller{uid, unknown};
  Quota most = max_groups(caller, general);
  for (const AccessRule& rule : rules_) {
    if (is_about(rule, caller)) break;  // it decides, whatever the groups are
    if (rule.unix_groups.empty()) continue;
    const Quota may_be = rule.max_groups ? Quota{*rule.max_groups, number_of(rule)} : general;
    if (may_be.limit > most.limit) most = may_be;
  }
  return most;
}

Quota AccessPolicy::max_arena_bytes(const Caller& caller, Quota general) const {
  return quota(caller, &AccessRule::max_arena_bytes, std::move(general));
}

Quota AccessPolicy::max_routing_bytes(const Caller& caller, Quota general) const {
  return quota(caller, &AccessRule::max_routing_bytes, std::move(general));
}

}  // namespace epd::supervisor
