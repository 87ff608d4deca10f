#pragma once

#include "common/status.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>

namespace epd {

// A limit on what one user may hold, and the option that set it.
struct Quota {
  std::uint64_t limit = std::numeric_limits<std::uint64_t>::max();
  std::string source;  // "limits.max_sessions_per_user", "access.rule 2"
};

// Limits of the memory of one user's ranks, as configured at the time of the request.
struct UserQuotas {
  Quota arena_bytes;
  Quota routing_bytes;
};

// The default limit of one of many holders: three quarters of the whole, so that others find room.
inline std::uint64_t share_of_one(std::uint64_t whole) {
  return std::max<std::uint64_t>(1, whole - (whole + 3) / 4);
}

// "user 1001 has 8 sessions; allowed: 8 (access.rule 2)"
inline Status over_quota(std::uint32_t uid, std::uint64_t used, const char* what, const Quota& quota) {
  return resource_exhausted("user " + std::to_string(uid) + " has " + std::to_string(used) + " " + what +
                            "; allowed: " + std::to_string(quota.limit) + " (" + quota.source + ")");
}

// The number of descriptors that this process may hold for clients: RLIMIT_NOFILE less a reserve for the
// daemon's own work, such as starting an engine or answering the control plane.
class DescriptorBudget;

// Descriptors that count for a user while this lives.
class DescriptorShare {
 public:
  DescriptorShare() = default;
  DescriptorShare(DescriptorShare&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)), uid_(other.uid_), count_(other.count_) {}
  DescriptorShare& operator=(DescriptorShare&& other) noexcept;
  ~DescriptorShare() { give_back(); }

  // Takes `more` in addition, if the budget allows it.
  Status grow(std::uint64_t more);

 private:
  friend class DescriptorBudget;
  DescriptorShare(DescriptorBudget& budget, std::uint32_t uid, std::uint64_t count)
      : budget_(&budget), uid_(uid), count_(count) {}
  void give_back();

  DescriptorBudget* budget_ = nullptr;
  std::uint32_t uid_ = 0;
  std::uint64_t count_ = 0;
};

// Threads: one thread makes all calls. Outlives its shares.
class DescriptorBudget {
 public:
  // `limit` is that of this process.
  explicit DescriptorBudget(std::uint64_t limit);

  // RESOURCE_EXHAUSTED, with the numbers, above what all clients may hold, or above half of that for one
  // user. So no user takes what the others need.
  Result<DescriptorShare> take(std::uint32_t uid, std::uint64_t count);

  std::uint64_t allowed() const { return allowed_; }
  std::uint64_t allowed_per_user() const { return allowed_ / 2; }
  std::uint64_t used() const { return used_; }

 private:
  friend class DescriptorShare;
  Status check(std::uint32_t uid, std::uint64_t count) const;
  void add(std::uint32_t uid, std::uint64_t count);
  void remove(std::uint32_t uid, std::uint64_t count);

  std::uint64_t limit_;
  std::uint64_t reserve_;
  std::uint64_t allowed_;
  std::uint64_t used_ = 0;
  std::map<std::uint32_t, std::uint64_t> of_user_;
};

}  // namespace epd
