// A limit on what one user may hold, and the option that set it.
#pragma once

#include "common/status.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace epd {

struct Quota {
  std::uint64_t limit = std::numeric_limits<std::uint64_t>::max();
  std::string source;  // "limits.max_sessions_per_user", "access.rule 2"
};

// Limits of the memory of one user's ranks, as configured when asked for.
struct UserQuotas {
  Quota arena_bytes;
  Quota routing_bytes;
};

// What one of many may hold if nobody has set it: three quarters of the whole, so that others find room.
inline std::uint64_t share_of_one(std::uint64_t whole) {
  return std::max<std::uint64_t>(1, whole - (whole + 3) / 4);
}

// "user 1001 has 8 sessions; allowed: 8 (access.rule 2)"
inline Status over_quota(std::uint32_t uid, std::uint64_t used, const char* what, const Quota& quota) {
  return resource_exhausted("user " + std::to_string(uid) + " has " + std::to_string(used) + " " + what +
                            "; allowed: " + std::to_string(quota.limit) + " (" + quota.source + ")");
}

}  // namespace epd
