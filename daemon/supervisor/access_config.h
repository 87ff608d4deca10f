// The [[access.rule]] entries of the configuration file.
#pragma once

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

// `node` is what stands under access.rule in the file `where`. Every refusal names the rule, the line, the
// value and what is allowed.
Result<AccessRules> read_access_rules(const toml::node& node, const std::string& where);

}  // namespace epd::supervisor
