// Decides who may attach, to which devices, which groups they may join, how much of each they may hold, and
// who may operate the daemon. Immutable and without I/O. Names of users and groups become numbers when the
// configuration is read: the system's answer may be slow (LDAP), and would delay the supervisor's loop.
#pragma once

#include "base/quota.h"
#include "proto/shape.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace epd::supervisor {

// The user who asks, according to the kernel.
struct Caller {
  std::uint32_t uid = 0;
  const std::vector<std::uint32_t>& gids;  // primary and supplementary
};

// Rights on the control plane. Each right includes those before it.
enum class Right : std::uint32_t { kNone, kRead, kChange };

// For callers to whom no rule applies, and for what a rule leaves open.
struct AccessDefaults {
  bool attach = true;
  Right operate = Right::kRead;
  std::int32_t max_priority = abi::kMaxPriority;
};

struct AccessRule {
  // To whom the rule applies; both empty: to everybody.
  std::vector<std::uint32_t> users;
  std::vector<std::uint32_t> unix_groups;

  bool attach = true;
  std::vector<std::string> groups;   // globs; empty: all
  std::vector<std::string> devices;  // likewise
  // In place of limits.max_..._per_user.
  std::optional<std::uint64_t> max_sessions;
  std::optional<std::uint64_t> max_groups;
  std::optional<std::uint64_t> max_arena_bytes;
  // In place of access.operate and limits.max_priority.
  std::optional<Right> operate;
  std::optional<std::int32_t> max_priority;
  std::optional<std::uint64_t> max_routing_bytes;

  std::string text;  // for operators: users=alice,1001 attach=true groups=prod-*
  std::string toml;  // for a configuration file: a line for each key
};

class AccessPolicy {
 public:
  AccessPolicy() = default;  // everybody may attach and read
  AccessPolicy(const AccessDefaults& defaults, std::vector<AccessRule> rules,
               std::map<std::uint32_t, std::string> names)
      : defaults_(defaults), rules_(std::move(rules)), names_(std::move(names)) {}

  // Each returns OK, or PERMISSION_DENIED that names the user, what was asked, and the rule or default that
  // refuses it. The first rule that applies to the caller decides everything. Later rules are not considered.
  Status may_attach(const Caller& caller) const;
  Status may_use_device(const Caller& caller, const std::string& device) const;
  Status may_join(const Caller& caller, const std::string& group) const;
  Status may_take_priority(const Caller& caller, std::int32_t priority) const;
  // `what` is for example "drain", as in "may not drain". Root has no exception here.
  Status may_operate(const Caller& caller, Right wanted, const std::string& what) const;

  // The rule's limit, or else `general`.
  Quota max_sessions(const Caller& caller, Quota general) const;
  Quota max_groups(const Caller& caller, Quota general) const;
  // The highest of what rules may give a user whose unix groups are not known.
  Quota most_groups(std::uint32_t uid, Quota general) const;
  Quota max_arena_bytes(const Caller& caller, Quota general) const;
  Quota max_routing_bytes(const Caller& caller, Quota general) const;

  const std::vector<AccessRule>& rules() const { return rules_; }
  void set_defaults(const AccessDefaults& defaults) { defaults_ = defaults; }

 private:
  const AccessRule* rule_for(const Caller& caller) const;
  std::string number_of(const AccessRule& rule) const;  // "access.rule 2"
  Status check_list(const Caller& caller, const std::string& asked, const std::string& name,
                    std::vector<std::string> AccessRule::*list) const;
  Quota quota(const Caller& caller, std::optional<std::uint64_t> AccessRule::*limit, Quota general) const;
  std::string name_of(std::uint32_t uid) const;

  AccessDefaults defaults_;
  std::vector<AccessRule> rules_;
  std::map<std::uint32_t, std::string> names_;  // names of users that rules name
};

}  // namespace epd::supervisor
