// How the registry names engines, sessions and their requests. A registry of one node's groups has one node,
// kLocalNode.
#pragma once

#include "proto/arena.h"

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>

namespace epd::membership {

inline constexpr std::uint32_t kLocalNode = 0;

struct EngineId {
  std::uint32_t node = kLocalNode;
  std::uint32_t device = 0;
  auto operator<=>(const EngineId&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14
};

struct SessionId {
  std::uint32_t node = kLocalNode;
  std::uint64_t number = 0;
  auto operator<=>(const SessionId&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14
};

// A Join or a Leave, as the client that waits for the answer has numbered it.
struct RequestId {
  SessionId session;
  std::uint32_t number = 0;
  auto operator<=>(const RequestId&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14
};

// Sessions that end together: one, or all of a node.
struct EndedSessions {
  EndedSessions(SessionId session) : node(session.node), number(session.number), all(false) {}
  static EndedSessions of_node(std::uint32_t node) {
    EndedSessions sessions(SessionId{node, 0});
    sessions.all = true;
    return sessions;
  }
  bool contains(SessionId session) const { return session.node == node && (all || session.number == number); }

  std::uint32_t node;
  std::uint64_t number;
  bool all;
};

// Only those who take part in an epoch know its key. Zero in groups of one node.
struct EpochKey {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const EpochKey&) const = default;
};

// "12", on another node than the local one "12 of node 3".
inline std::string to_string(const SessionId& session) {
  return std::to_string(session.number) +
         (session.node == kLocalNode ? "" : " of node " + std::to_string(session.node));
}

// A membership's name: index in the low half, generation (never 0) in the high half, so
// that a stale name is told from a fresh one. Indices are reused within a session.
constexpr std::uint32_t make_member_id(std::uint32_t index, std::uint32_t generation) {
  return (generation << 16) | (index & 0xffffu);
}
constexpr std::uint32_t member_index(std::uint32_t member) {
  return member & 0xffffu;
}
constexpr std::uint32_t member_generation(std::uint32_t member) {
  return member >> 16;
}

// Limits of groups, from the configuration.

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
