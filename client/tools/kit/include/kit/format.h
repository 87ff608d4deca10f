#pragma once

#include <cstdio>
#include <string>

namespace epd::kit {

// As printf; at most 511 characters.
inline std::string format(const char* pattern, auto... values) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

}  // namespace epd::kit
