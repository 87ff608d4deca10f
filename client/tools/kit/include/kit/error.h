// How tools fail: one exception, thrown where the tool can't go on, caught in main or by the team.
#pragma once

#include "epd/epd.h"

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>

namespace epd::kit {

class ToolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const std::string& message) {
  throw ToolError(message);
}

// fail("<what>: <strerror(errno)>")
[[noreturn]] inline void fail_errno(const std::string& what) {
  fail(what + ": " + std::error_code(errno, std::generic_category()).message());
}

// Throw, naming the value and what is allowed, unless it is.
inline void require_range(const std::string& name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  fail(name + " is " + std::to_string(value) + "; allowed: " + std::to_string(low) + ".." +
       std::to_string(high));
}
inline void require_multiple(const std::string& name, std::uint32_t value, std::uint32_t factor) {
  if (value != 0 && value % factor == 0) return;
  fail(name + " is " + std::to_string(value) + "; allowed: multiples of " + std::to_string(factor));
}

// Throws "<what>: <status name>: <epd_last_error()>" unless status is EPD_OK.
inline void require(epd_status_t status, const std::string& what) {
  if (status == EPD_OK) return;
  fail(what + ": " + epd_status_name(status) + ": " + epd_last_error());
}

}  // namespace epd::kit
