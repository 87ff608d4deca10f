// How tools fail: one exception, thrown where the tool can't go on, caught in main or by the team.
#pragma once

#include "epd/epd.h"

#include <cstdint>
#include <stdexcept>
#include <string>

namespace epd::kit {

class ToolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const std::string& message);
// fail("<what>: <strerror(errno)>")
[[noreturn]] void fail_errno(const std::string& what);
// Throw, naming the value and what is allowed, unless it is.
void require_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high);
void require_multiple(const char* name, std::uint32_t value, std::uint32_t of);
// Throws "<what>: <status name>: <epd_last_error()>" unless status is EPD_OK.
void require(epd_status_t status, const std::string& what);

}  // namespace epd::kit
