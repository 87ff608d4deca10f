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

void require(epd_status_t status, const std::string& what) {
  if (status == EPD_OK) return;
  std::string message = what + ": " + epd_status_name(status);
  const char* detail = epd_last_error();
  if (detail != nullptr && *detail != '\0') message += std::string(": ") + detail;
  fail(message);
}

}  // namespace epd::kit
