// The table of options: the one place where keys, defaults, limits and help texts are written.
#pragma once

#include "supervisor/config.h"

#include <variant>

namespace epd::supervisor {

enum class OptionKind {
  kText,
  kNumber,
  kAutoNumber,
  kSigned,
  kBytes,
  kOctal,
  kChoice,
  kGpus,
  kSwitch,
  kNames,
  kLevels
};

struct Option {
  const char* key;
  const char* default_text;
  OptionKind kind;
  std::variant<std::string Config::*, std::uint32_t Config::*, std::uint64_t Config::*,
               std::int32_t Config::*, GpuList Config::*, std::vector<std::string> Config::*>
      field;
  std::int64_t low;   // numbers
  std::int64_t high;  // numbers
  std::vector<const char*> choices;
  const char* environment;
  bool reloadable;
  const char* help;
};

inline constexpr std::int64_t kMaxBytes = std::int64_t{1} << 50;

const std::vector<Option>& option_table();
// Null: there is no such option.
const Option* find_option(const std::string& key);
// "1..1024"
std::string allowed_values(const Option& option);
// Parses `text` and stores it. INVALID_ARGUMENT names key, value and what is allowed, and `where` the text
// stands if that is not "".
Status store_option(const Option& option, const std::string& text, Config& config,
                    const std::string& where = "");

// "12345", "64MiB", "10GiB"; false if it is none of these.
bool parse_bytes(const std::string& text, std::uint64_t& bytes);

}  // namespace epd::supervisor
