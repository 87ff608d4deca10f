#include "errors.h"

#include "proto/wire.h"

#include <cstdio>
#include <cstring>
#include <iterator>

namespace epd::client {
namespace {

static_assert(static_cast<int>(StatusCode::kOk) == EPD_OK);
static_assert(static_cast<int>(StatusCode::kWouldBlock) == EPD_WOULD_BLOCK);
static_assert(static_cast<int>(StatusCode::kInvalidArgument) == EPD_INVALID_ARGUMENT);
static_assert(static_cast<int>(StatusCode::kNotFound) == EPD_NOT_FOUND);
static_assert(static_cast<int>(StatusCode::kPermissionDenied) == EPD_PERMISSION_DENIED);
static_assert(static_cast<int>(StatusCode::kResourceExhausted) == EPD_RESOURCE_EXHAUSTED);
static_assert(static_cast<int>(StatusCode::kUnsupported) == EPD_UNSUPPORTED);
static_assert(static_cast<int>(StatusCode::kVersionMismatch) == EPD_VERSION_MISMATCH);
static_assert(static_cast<int>(StatusCode::kDeadlineExceeded) == EPD_DEADLINE_EXCEEDED);
static_assert(static_cast<int>(StatusCode::kRankLost) == EPD_RANK_LOST);
static_assert(static_cast<int>(StatusCode::kEngineRestarted) == EPD_ENGINE_RESTARTED);
static_assert(static_cast<int>(StatusCode::kDaemonLost) == EPD_DAEMON_LOST);
static_assert(static_cast<int>(StatusCode::kAborted) == EPD_ABORTED);
static_assert(static_cast<int>(StatusCode::kInternal) == EPD_INTERNAL && kNumStatusCodes == EPD_INTERNAL + 1);

// A plain array, so no constructor runs in threads that never fail, and no destructor remains after
// dlclose().
thread_local char last_error[1024];

}  // namespace

Status bad_value(const char* field, long long value, const std::string& allowed) {
  return invalid_argument(std::string(field) + " is " + std::to_string(value) + "; allowed: " + allowed);
}

std::string hex(std::uint64_t number) {
  char text[19];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(number));
  return text;
}

StatusCode checked_code(std::uint32_t raw) {
  return raw < static_cast<std::uint32_t>(kNumStatusCodes) ? static_cast<StatusCode>(raw)
                                                           : StatusCode::kInternal;
}

std::string describe(StatusCode code, std::int32_t failed_rank) {
  const std::string about = failed_rank >= 0 ? " (rank " + std::to_string(failed_rank) + ")" : "";
  switch (code) {
    case StatusCode::kOk: return "";
    case StatusCode::kDeadlineExceeded: return "the operation did not end before its deadline" + about;
    case StatusCode::kRankLost: return "a rank of the group is gone; the group has ended" + about;
    case StatusCode::kEngineRestarted:
      return "the device's engine died and is back; call epd_group_resume and submit again" + about;
    case StatusCode::kDaemonLost: return "the daemon is gone; detach and attach again";
    case StatusCode::kAborted: return "the operation was given up" + about;
    default: return std::string("the operation ended with ") + status_name(code) + about;
  }
}

// A text that is too long loses its middle: the end says what is allowed.
epd_status_t report(StatusCode code, const char* text) {
  constexpr char kGap[] = " ... ";
  constexpr std::size_t kPart = (sizeof(last_error) - sizeof(kGap)) / 2;
  if (code == StatusCode::kOk) return static_cast<epd_status_t>(code);
  const std::size_t length = std::strlen(text);
  abi::set_text(last_error, text, length);
  if (length < sizeof(last_error)) return static_cast<epd_status_t>(code);
  std::memcpy(last_error + kPart, kGap, sizeof(kGap) - 1);
  std::memcpy(last_error + kPart + sizeof(kGap) - 1, text + length - kPart, kPart + 1);
  return static_cast<epd_status_t>(code);
}

epd_status_t report(const Status& status) {
  return report(status.code(), status.message().c_str());
}

}  // namespace epd::client

extern "C" {

const char* epd_version(void) {
  return EPD_CLIENT_VERSION;
}

const char* epd_status_name(epd_status_t status) {
  return epd::status_name(static_cast<epd::StatusCode>(status));
}

const char* epd_last_error(void) {
  return epd::client::last_error;
}

}  // extern "C"
