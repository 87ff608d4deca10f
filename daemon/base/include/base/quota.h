// A limit on what one user may hold, and the option that set it.
#pragma once

#include "common/status.h"

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

// "user 1001 has 8 sessions; allowed: 8 (access.rule 2)"
inline Status over_quota(std::uint32_t uid, std::uint64_t used, const char* what, const Quota& quota) {
  return resource_exhausted("user " + std::to_string(uid) + " has " + std::to_string(used) + " " + what +
                            "; allowed: " + std::to_string(quota.limit) + " (" + quota.source + ")");
}

}  // namespace epd
