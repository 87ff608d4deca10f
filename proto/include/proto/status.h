// Status codes shared by the daemon, the wire formats and the client library.
#pragma once

#include <cstdint>

namespace epd {

// Values are part of the shared-memory and C ABI: append only, never renumber.
enum class StatusCode : std::int32_t {
  kOk = 0,
  kWouldBlock = 1,
  kInvalidArgument = 2,
  kNotFound = 3,
  kPermissionDenied = 4,
  kResourceExhausted = 5,
  kUnsupported = 6,
  kVersionMismatch = 7,
  kDeadlineExceeded = 8,
  kRankLost = 9,
  kEngineRestarted = 10,
  kDaemonLost = 11,
  kAborted = 12,
  kInternal = 13,
};

inline constexpr std::int32_t kNumStatusCodes = 14;

constexpr const char* status_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "OK";
    case StatusCode::kWouldBlock: return "WOULD_BLOCK";
    case StatusCode::kInvalidArgument: return "INVALID_ARGUMENT";
    case StatusCode::kNotFound: return "NOT_FOUND";
    case StatusCode::kPermissionDenied: return "PERMISSION_DENIED";
    case StatusCode::kResourceExhausted: return "RESOURCE_EXHAUSTED";
    case StatusCode::kUnsupported: return "UNSUPPORTED";
    case StatusCode::kVersionMismatch: return "VERSION_MISMATCH";
    case StatusCode::kDeadlineExceeded: return "DEADLINE_EXCEEDED";
    case StatusCode::kRankLost: return "RANK_LOST";
    case StatusCode::kEngineRestarted: return "ENGINE_RESTARTED";
    case StatusCode::kDaemonLost: return "DAEMON_LOST";
    case StatusCode::kAborted: return "ABORTED";
    case StatusCode::kInternal: return "INTERNAL";
  }
  return "UNKNOWN";
}

}  // namespace epd
