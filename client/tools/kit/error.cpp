#include "kit/error.h"

#include <cerrno>
#include <system_error>

namespace epd::kit {

void fail(const std::string& message) {
  throw ToolError(message);
}

void fail_errno(const std::string& what) {
  fail(what + ": " + std::error_code(errno, std::generic_category()).message());
}

void require_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  fail(std::string(name) + " is " + std::to_string(value) + "; allowed: " + std::to_string(low) + ".." +
       std::to_string(high));
}

void require_multiple(const char* name, std::uint32_t value, std::uint32_t of) {
  if (value == 0 || value % of != 0)
    fail(std::string(name) + " is " + std::to_string(value) + "; allowed: multiples of " +
         std::to_string(of));
}

void require(epd_status_t status, const std::string& what) {
  if (status == EPD_OK) return;
  std::string message = what + ": " + epd_status_name(status);
  const char* detail = epd_last_error();
  if (detail != nullptr && *detail != '\0') message += std::string(": ") + detail;
  fail(message);
}

}  // namespace epd::kit
