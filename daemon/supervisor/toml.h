// toml++ with results instead of exceptions, which Debian's compiled library does not offer: headers only.
#pragma once

#define TOML_EXCEPTIONS 0
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <algorithm>
#include <string>

namespace epd::supervisor {

// " (line 12)"
inline std::string line_of(const toml::source_region& source) {
  return " (line " + std::to_string(source.begin.line) + ")";
}
inline std::string line_of(const toml::node& node) {
  return line_of(node.source());
}

// Control characters, which a file may write as escapes, belong in no value: system calls would see the name
// only up to a zero, and logs would be torn.
inline bool has_control_characters(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

}  // namespace epd::supervisor
