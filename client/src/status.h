// What can go wrong inside the library, and the calling thread's last error.
#pragma once

#include "epd/epd.h"
#include "proto/status.h"

#include <string>
#include <utility>

namespace epd::client {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string text) : code_(code), text_(std::move(text)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& text() const { return text_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string text_;
};

inline Status invalid_argument(std::string text) {
  return {StatusCode::kInvalidArgument, std::move(text)};
}
inline Status not_found(std::string text) {
  return {StatusCode::kNotFound, std::move(text)};
}
inline Status would_block(std::string text) {
  return {StatusCode::kWouldBlock, std::move(text)};
}
inline Status daemon_lost(std::string text) {
  return {StatusCode::kDaemonLost, std::move(text)};
}
inline Status internal_error(std::string text) {
  return {StatusCode::kInternal, std::move(text)};
}
// "<field> is <value>; allowed: <allowed>"
Status bad_value(const char* field, long long value, const std::string& allowed);
// RESOURCE_EXHAUSTED when descriptors or memory ran out, else INTERNAL; "<what>: <strerror>".
Status errno_status(const std::string& what, int error);
// A code read from shared memory; INTERNAL if it is none of ours.
StatusCode checked_code(std::uint32_t raw);
// For a status that came without a message.
std::string describe(StatusCode code, std::int32_t culprit_rank);

// Keeps the text for epd_last_error() unless the status is OK. Never allocates.
epd_status_t report(const Status& status);
epd_status_t report(StatusCode code, const char* text);

}  // namespace epd::client
