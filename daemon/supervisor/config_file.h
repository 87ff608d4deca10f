// The configuration file, read into the texts of options and the access rules, and written from a Config.
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
  std::uint32_t line = Refusals::kNoLine;
};
// The values of the file, overridden by the environment and then by the flags.
struct Settings {
  std::map<std::string, Setting> values;
  AccessRules access;
  Refusals refusals;  // unknown names, values of a wrong type
};

// Reads the file of `sources`; nothing if it need not exist and does not. Refused as a whole only if it can't
// be read or is no TOML.
Status read_file(const ConfigSources& sources, Settings& settings);
// The text of a flag, as read_file gives the same value of the file: TOML's ["a", "b"] as "a,b", if the
// option is a list. Other text stays as it is.
std::string text_of_flag(const Option& option, const std::string& text);

}  // namespace epd::supervisor
