// Who may attach, to which devices, which groups they may join, how much of each they may hold, and who may
// operate the daemon. Immutable
// and without I/O: names of users and groups become numbers when the configuration is read, because asking
// the system for them (LDAP) could hold up the supervisor's loop.
#pragma once

#include "base/quota.h"
#include "proto/shape.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace epd::supervisor {

// Who asks, as the kernel knows it.
struct Caller {
  std::uint32_t uid = 0;
  const std::vector<std::uint32_t>& gids;  // primary and supplementary
};

// What a caller of the control plane may do; each includes those before it.
enum class Right : std::uint32_t { kNone, kRead, kChange };

// For callers whom no rule is about, and for what a rule does not say.
struct AccessDefaults {
  bool attach = true;
  Right operate = Right::kRead;
  std::int32_t max_priority = abi::kMaxPriority;
};

struct AccessRule {
  // Whom it is about; both empty: everybody.
  std::vector<std::uint32_t> users;
  std::vector<std::uint32_t> unix_groups;

  bool attach = true;
  std::vector<std::string> groups;   // globs; empty: all
  std::vector<std::string> devices;  // likewise
  // Instead of limits.max_..._per_user.
  std::optional<std::uint64_t> max_sessions;
  std::optional<std::uint64_t> max_groups;
  std::optional<std::uint64_t> max_arena_bytes;
  // Instead of access.operate and limits.max_priority.
  std::optional<Right> operate;
  std::optional<std::int32_t> max_priority;
  std::optional<std::uint64_t> max_routing_bytes;

  std::string text;  // for operators: users=alice,1001 attach=true groups=prod-*
};

class AccessPolicy {
 public:
  AccessPolicy() = default;  // everybody may attach and read
  AccessPolicy(const AccessDefaults& defaults, std::vector<AccessRule> rules,
               std::map<std::uint32_t, std::string> names)
      : defaults_(defaults), rules_(std::move(rules)), names_(std::move(names)) {}

  // Each is OK or PERMISSION_DENIED naming the user, what was asked, and the rule or default that says no.
  // The first rule that is about the caller decides everything; those after it are not looked at.
  Status may_attach(const Caller& caller) const;
  Status may_use_device(const Caller& caller, const std::string& device) const;
  Status may_join(const Caller& caller, const std::string& group) const;
  Status may_take_priority(const Caller& caller, std::int32_t priority) const;
  // `what`: "drain", after "may not". Root is asked about like anybody else.
  Status may_operate(const Caller& caller, Right wanted, const std::string& what) const;

  // The rule's, or else `general`.
  Quota max_sessions(const Caller& caller, Quota general) const;
  Quota max_groups(const Caller& caller, Quota general) const;
  Quota max_arena_bytes(const Caller& caller, Quota general) const;
  Quota max_routing_bytes(const Caller& caller, Quota general) const;

  const std::vector<AccessRule>& rules() const { return rules_; }

 private:
  const AccessRule* rule_for(const Caller& caller) const;
  std::string number_of(const AccessRule& rule) const;  // "access.rule 2"
  Status check_list(const Caller& caller, const std::string& asked, const std::string& name,
                    std::vector<std::string> AccessRule::*list) const;
  Quota quota(const Caller& caller, std::optional<std::uint64_t> AccessRule::*limit, Quota general) const;
  std::string name_of(std::uint32_t uid) const;

  AccessDefaults defaults_;
  std::vector<AccessRule> rules_;
  std::map<std::uint32_t, std::string> names_;  // of users that rules name
};

}  // namespace epd::supervisor
