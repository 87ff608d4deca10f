// What the configuration says about groups.
#pragma once

#include "proto/arena.h"

#include <cstddef>
#include <cstdint>

namespace epd::membership {

// Joins of one session that others are in the way of; further ones are refused at once.
inline constexpr std::size_t kMaxConflictsPerSession = 8;

struct MembershipLimits {
  std::uint32_t max_groups = 256;
  std::uint32_t join_timeout_ms = 60'000;
  std::uint32_t engine_ack_ms = 3'000;     // kStopMember, recoverable kBreak, kRemoveGroup
  std::uint32_t engine_start_ms = 10'000;  // kGroupCommit until kGroupReady
  std::uint32_t operation_ms = 30'000;     // a fatal kBreak may wait for operations to end, so: ack + this
  std::uint64_t last_epoch = abi::kLastEpoch;
  std::uint32_t conflict_ms = 0;  // a join that others are in the way of is tried again for so long
};

}  // namespace epd::membership
