// toml++ with results instead of exceptions, which Debian's compiled library does not offer: headers only.
#pragma once

#define TOML_EXCEPTIONS 0
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <string>

namespace epd {

// " (line 12)"
inline std::string line_of(const toml::source_region& source) {
  return " (line " + std::to_string(source.begin.line) + ")";
}
inline std::string line_of(const toml::node& node) {
  return line_of(node.source());
}

}  // namespace epd
