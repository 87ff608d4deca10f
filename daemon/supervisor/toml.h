// toml++ with results instead of exceptions. Debian's compiled library does not offer that, so only its
// headers are used.
#pragma once

#define TOML_EXCEPTIONS 0
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>

namespace epd::supervisor {

// " (line 12)"
inline std::string line_of(const toml::source_region& source) {
  return " (line " + std::to_string(source.begin.line) + ")";
}
inline std::string line_of(const toml::node& node) {
  return line_of(node.source());
}
inline std::uint32_t line_number(const toml::node& node) {
  return node.source().begin.line;
}

// A value as a file has to write it: in ASCII.
inline std::string toml_text(const toml::node& value) {
  std::ostringstream text;
  text << toml::toml_formatter(value, toml::format_flags::none);
  return text.str();
}

// A file may write control characters as escapes. No value may contain them: system calls would see a name
// only up to a zero, and log lines would be torn.
inline bool has_control_characters(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

}  // namespace epd::supervisor
