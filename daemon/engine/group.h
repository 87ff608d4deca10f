// A group as one engine sees it: everybody's arenas, and the members that this device serves.
#pragma once

#include "base/memory.h"
#include "device/device.h"
#include "proto/link.h"
#include "stats.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace epd {

class SessionPort;

enum class GroupPhase {
  kStarting,  // until kGroupCommit
  kActive,
  kBreaking,  // recoverable: operations have failed; until kResume
  kLost,      // fatal
};

struct GroupRankMemory {
  Mapping user;
  Mapping exchange;
  std::uint32_t device_index = 0;
};

// An engine to ring; several ranks may share one.
struct PeerEngine {
  std::uint32_t device_index = 0;
  UniqueFd bell;
  Mapping page;
};

// Where combine finds the rows of the last dispatch on a slot.
struct Route {
  std::uint64_t handle = 0;  // op_index + 1; 0 = none
  std::uint64_t epoch = 0;   // of the dispatch: a rank that came later holds none of its rows
  kernels::RoutingPlan plan;
  std::vector<std::uint32_t> base_rows;  // [R]
};

struct Group;

inline constexpr std::uint64_t kNoFailure = ~std::uint64_t{0};

// One rank that this device serves.
class Member {
 public:
  Member(Group& in_group, std::uint32_t rank_there, std::uint32_t its_number, SessionPort* served,
         Mapping board_memory)
      : group(in_group),
        rank(rank_there),
        number(its_number),
        session(served),
        board_mapping(std::move(board_memory)) {}

  abi::Board& board() const { return *board_mapping.as<abi::Board>(); }
  std::byte* user(std::uint32_t slot, abi::Region region) const;
  // Lowest operation not completed.
  std::uint64_t next_index() const {
    return std::min(inflight.empty() ? next_number : *inflight.begin(), failed_from);
  }
  void publish_next_index() const;
  // Changes the board's group state under its seqlock.
  void publish_state(abi::GroupState state, const abi::Break& cause) const;
  // Message for one operation; must precede its completion.
  void publish_message(std::uint32_t slot, std::uint64_t ticket, const std::string& text) const;
  // Counts of a dispatch, for the CPU.
  void publish_counts(std::uint32_t slot, std::uint64_t ticket, const std::vector<std::int32_t>& offsets,
                      const std::vector<std::int32_t>& experts) const;
  // The routing named by handle, from memory or, after a restart, from the arena, without the rows of ranks
  // that were lost since; empty if the dispatch was before this rank's time; null if stale.
  Route* find_route(std::uint32_t slot, std::uint64_t handle);
  void save_route(std::uint32_t slot) const;
  // Selections that the last dispatch on the slot dropped; from the arena.
  std::uint32_t saved_dropped(std::uint32_t slot) const;

  Group& group;
  const std::uint32_t rank;
  const std::uint32_t number;  // as in submissions
  SessionPort* session;        // null once removed
  Mapping board_mapping;
  std::uint64_t first_index = 0;           // the operation with which this rank came
  std::uint64_t next_number = 0;           // of the next operation
  std::uint64_t failed_from = kNoFailure;  // lowest that failed in this epoch: to be done again
  std::set<std::uint64_t> inflight;        // numbers of operations not completed
  std::vector<std::uint64_t> slot_op;      // [depth] ticket in flight on the slot, 0 = free
  std::vector<Route> routes;               // [depth]
  bool stopped = false;
  Statistics statistics;

 private:
  bool load_route(std::uint32_t slot, std::uint64_t handle, Route& route) const;
};

struct Group {
  std::uint64_t id = 0;
  std::string name;
  abi::GroupShape shape{};
  abi::UserArenaLayout user_layout{abi::GroupShape{1, 1, 1, 128, 1, 1, {}, {}, {}}};
  abi::ExchangeArenaLayout exchange_layout{abi::GroupShape{1, 1, 1, 128, 1, 1, {}, {}, {}}};
  std::uint32_t sms = 0;      // 0 = the device's
  std::int32_t priority = 0;  // among the groups of the device; higher goes first
  std::uint64_t epoch = 0;
  std::uint64_t resume_index = 0;
  GroupPhase phase = GroupPhase::kStarting;
  bool starts_broken = false;  // a restarted engine: wait for kResume
  bool break_requested = false;
  bool break_acked = false;
  bool released = false;                           // kRelease: operations fail at once until kResume
  abi::Break cause{};                              // of the break under way, or of the last
  std::vector<GroupRankMemory> ranks;              // [R]; emptied when lost
  std::vector<std::uint64_t> active_since;         // [R] epoch in which the rank came; 0 = masked
  std::vector<std::uint8_t> masked;                // [R] active_since as a mask; empty while no rank is
  std::uint64_t changed_epoch = 0;                 // in which a rank was last masked or replaced
  std::vector<std::unique_ptr<PeerEngine>> peers;  // engines of the group, each once
  std::vector<std::unique_ptr<Member>> members;

  void set_shape(const abi::GroupShape& new_shape);
  bool active(std::uint32_t rank) const { return active_since[rank] != 0; }
  // Whether the rank holds what it was sent in that epoch.
  bool serves(std::uint32_t rank, std::uint64_t since_epoch) const {
    return active(rank) && active_since[rank] <= since_epoch;
  }
  // `since` 0 masks the rank. Peers that no active rank needs any more are let go.
  void set_active(std::uint32_t rank, std::uint64_t since);
  // Takes the rows of ranks that do not serve the route's epoch out of its plan.
  void drop_lost(Route& route) const;
  // Wakes the sleeping engines among `peers`. After a release store that they wait for.
  void ring_peers() const;
  std::string check_complete() const;  // what a commit finds missing; "" if nothing
};

}  // namespace epd
