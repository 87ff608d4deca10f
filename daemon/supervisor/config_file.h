// The configuration file, read into the texts of options and the access rules.
#pragma once

#include "access_config.h"
#include "config_table.h"

#include <map>
#include <string>

namespace epd::supervisor {

inline constexpr const char* kRules = "access.rule";

struct Setting {
  std::string text;
  const char* origin;
  std::string where;  // for refusals: "epd.toml (line 3)", "the flags"
};
// What the file says, then what the environment and the flags say.
struct Settings {
  std::map<std::string, Setting> values;
  AccessRules access;
};

// What the file of `sources` says; nothing if it need not exist and does not.
Status read_file(const ConfigSources& sources, Settings& settings);
// The text of a flag, as read_file gives the same value of the file: TOML's ["a", "b"] as "a,b", if the
// option is a list. What is no such list stays as it is.
std::string text_of_flag(const Option& option, const std::string& text);

}  // namespace epd::supervisor
