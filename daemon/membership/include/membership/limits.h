// Limits of groups, from the configuration.
#pragma once

#include "membership/ids.h"
#include "proto/arena.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>

namespace epd::membership {

// Joins of one session that may wait for conflicting members to go. Further ones are refused at once.
inline constexpr std::size_t kMaxConflictsPerSession = 8;

struct MembershipLimits {
  std::uint32_t max_groups = 256;
  std::uint32_t join_timeout_ms = 60'000;
  std::uint32_t engine_ack_ms = 3'000;     // kStopMember, recoverable kBreak, kRemoveGroup
  std::uint32_t engine_start_ms = 10'000;  // kGroupCommit until kGroupReady
  std::uint32_t operation_ms = 30'000;     // a fatal kBreak may wait for operations to end, so: ack + this
  std::uint64_t last_epoch = abi::kLastEpoch;
  std::uint32_t conflict_ms = 0;  // a join that conflicts with members is tried again this long
};

// Between agents and their coordinator.
struct ClusterTimes {
  std::uint32_t heartbeat_ms = 100;
  std::uint32_t node_timeout_ms = 2'000;  // a node that is silent this long is lost
  std::uint32_t orphan_ms = 10'000;       // an agent cut off this long ends groups that need a decision
};

// Memberships of groups that span nodes have indices from here on, those of a node's own groups below.
inline constexpr std::uint32_t kFirstSpanningIndex = 256;

// The number of lost nodes that are remembered, and for how long.
inline constexpr std::size_t kMaxLostNodes = 4096;
inline constexpr std::uint64_t kLostNodeMs = 600'000;

// Settings of a registry of groups that span nodes. A registry of a node's own groups has none.
struct Spanning {
  std::uint64_t first_group_id = 1;
  std::uint32_t first_member_index = 0;  // of each session; other registries number its memberships below
  std::function<EpochKey()> new_epoch_key;
  std::set<std::uint64_t> taken_group_ids{};  // which no new group gets
};

}  // namespace epd::membership
