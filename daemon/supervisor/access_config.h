// The [[access.rule]] entries of the configuration file.
#pragma once

#include "refusals.h"
#include "supervisor/access_policy.h"
#include "toml.h"

#include <map>
#include <string>
#include <vector>

namespace epd::supervisor {

struct AccessRules {
  std::vector<AccessRule> rules;
  std::map<std::uint32_t, std::string> names;  // of users, as the rules write them
};

// `node` is what the file `where` has under access.rule. Every refusal names the rule, the line, the value
// and what is allowed.
AccessRules read_access_rules(const toml::node& node, const std::string& where, Refusals& refusals);

}  // namespace epd::supervisor
