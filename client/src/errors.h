// Texts of errors, and the calling thread's last one.
#pragma once

#include "common/status.h"
#include "epd/epd.h"

#include <cstdint>
#include <string>
#include <utility>

namespace epd::client {

inline Status daemon_lost(std::string text) {
  return {StatusCode::kDaemonLost, std::move(text)};
}
// "<field> is <value>; allowed: <allowed>"
Status bad_value(const char* field, long long value, const std::string& allowed);
// "0x1f"
std::string hex(std::uint64_t number);
// A code from shared memory; INTERNAL if it is not one of ours.
StatusCode checked_code(std::uint32_t raw);
// The text of a status that came without one.
std::string describe(StatusCode code, std::int32_t failed_rank);

// Keeps the text for epd_last_error() unless the status is OK. Never allocates.
epd_status_t report(const Status& status);
epd_status_t report(StatusCode code, const char* text);

}  // namespace epd::client
