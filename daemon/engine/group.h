// A group as one engine sees it: the arenas of all ranks, and the members that this device serves.
#pragma once

#include "base/log.h"
#include "common/memory.h"
#include "device/launcher.h"
#include "far_side.h"
#include "group_life.h"
#include "proto/link.h"
#include "proto/waits.h"
#include "stats.h"

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace epd::engine {

class Calls;
class SessionPort;

// A rank's memory.
struct GroupRankMemory {
  std::shared_ptr<device::Arena> user;      // also kept by the kernel that reads its call words
  std::shared_ptr<device::Arena> exchange;  // also kept by a lane that reads its signals
  // Its client's own, in which rows of calls may lie, by number; empty: it has mapped none.
  struct Mapped {
    abi::MappedMemory memory;
    std::unique_ptr<device::Arena> arena;
    std::uint64_t whole = 0;  // bytes of the arena
  };
  std::vector<Mapped> mapped;
  std::uint32_t device_index = 0;

  // How the device's operations reach the rank; empty while it is inactive.
  kernels::PeerView view;

  // Called once the arenas are mapped.
  void place_regions(const abi::GroupShape& shape);
  void set_active(std::uint64_t since);  // 0: inactive
  // The only function that knows where a region lies.
  const kernels::RegionPlace& region(abi::Region region) const {
    return places_[static_cast<std::size_t>(region)];
  }
  std::byte* at(std::uint32_t slot, abi::Region region) const {
    return this->region(region).at<std::byte>(slot);
  }
  std::byte* call_words() const { return user->bytes() + layout_.calls; }
  std::uint64_t user_bytes() const { return layout_.total_bytes; }

 private:
  abi::UserArenaLayout layout_{abi::GroupShape{1, 1, 1, 128, 1, 1, {}, {}, {}}};
  std::array<kernels::RegionPlace, abi::kNumRegions> places_{};
};

// An engine to ring. Ranks and groups share it.
struct PeerEngine {
  std::uint32_t device_index = 0;
  UniqueFd bell;
  Mapping page;
};

struct Group;

inline constexpr std::uint64_t kNoFailure = ~std::uint64_t{0};

// One rank that this device serves.
class Member {
 public:
  Member(Group& in_group, std::uint32_t rank_there, std::uint32_t its_number, SessionPort* served,
         Mapping board_memory);
  ~Member();

  abi::Board& board() const { return *board_mapping.as<abi::Board>(); }
  abi::RankWaits waits() const;
  std::byte* user(std::uint32_t slot, abi::Region region) const;
  std::byte* exchange() const;
  // The lowest operation that has not completed.
  std::uint64_t next_index() const { return std::min(next_number, failed_from); }
  void publish_next_index() const;
  // Changes the board's group state under its seqlock.
  void publish_state(abi::GroupState state, const abi::Break& cause) const;
  // The rank calls no more. Where the others continue no longer depends on it.
  void stop();
  bool stopped() const { return stopped_; }

  Group& group;
  const std::uint32_t rank;
  const std::uint32_t number;  // of the membership
  SessionPort* session;        // null once it is removed
  Mapping board_mapping;
  std::uint64_t first_index = 0;           // the first operation in which this rank takes part
  std::uint64_t next_number = 0;           // of the first operation that has not completed
  std::uint64_t failed_from = kNoFailure;  // the lowest that failed in this epoch and is to be repeated
  std::unique_ptr<device::Lane> lane;      // null: it could not be opened, or the group was lost
  kernels::GroupView view;                 // filled in if the lane is present
  std::shared_ptr<device::Arena> results;  // abi::Results
  std::unique_ptr<Calls> calls;            // present if the lane is
  Statistics statistics;

 private:
  bool stopped_ = false;
};

struct Group {
  // `far_side` is for a group whose ranks are on several nodes, else null.
  Group(const abi::GroupBegin& message, std::unique_ptr<FarSide> far_side);

  const std::uint64_t id;
  const std::string name;
  const abi::GroupShape shape;
  const abi::ExchangeArenaLayout exchange_layout;
  std::uint32_t sms;                       // that an operation may use on its device; 0: all
  std::optional<std::uint32_t> linger_us;  // no value: the device's
  std::int32_t priority;                   // among the device's groups, higher first
  std::uint64_t epoch;
  std::uint64_t resume_index;  // first operation of the epoch
  GroupLife life;
  std::uint64_t owed_since_ns = 0;
  std::uint64_t say_waits_ns =
      0;  // when the supervisor is next told what the operations wait for, if they have not begun
  bool waits_logged = false;
  Status unusable;                          // why this device can't serve it
  std::uint64_t broken_ns = 0;              // when the current break began
  abi::Break cause{};                       // of the current break, or of the last one
  std::vector<GroupRankMemory> ranks;       // [R]; emptied when the group is lost
  std::vector<std::uint64_t> active_since;  // [R] epoch in which the rank joined; 0: masked
  std::set<std::uint32_t> refused;          // masked by this engine alone, until the supervisor says more
  std::vector<std::uint8_t> masked;         // [R] active_since as a mask; empty while no rank is masked
  std::uint64_t changed_epoch = 0;          // in which a rank was last masked or replaced
  std::vector<std::shared_ptr<PeerEngine>> peers;  // engines of the group on this node, without duplicates
  std::unique_ptr<FarSide> far;                    // null: all ranks are on this node. Outlives lanes
  std::vector<std::unique_ptr<Member>> members;
  mutable LogLimiter failures;  // lines about failed operations, so that no group's suppress another's

  // Converts an operation's number of this epoch to that of tags, blocks and routing records, and back.
  std::uint64_t in_tags(std::uint64_t index) const { return index - abi::tag_base(resume_index); }
  std::uint64_t from_tags(std::uint64_t number) const { return number + abi::tag_base(resume_index); }
  bool active(std::uint32_t rank) const { return active_since[rank] != 0; }
  // Whether the rank is on this node, so that its memory is mapped here.
  bool is_near(std::uint32_t rank) const { return far == nullptr || far->is_near(rank); }
  // Whether the rank still holds what it was sent in that epoch.
  bool serves(std::uint32_t rank, std::uint64_t since_epoch) const {
    return active(rank) && active_since[rank] <= since_epoch;
  }
  // Whether the device has left all calls of its members.
  bool settled() const;
  Member* member(std::uint32_t rank) const;  // null: this device does not serve it
  // `since` 0 masks the rank. Peers that no active rank needs any more are forgotten. For a far rank its node
  // must be known.
  void set_active(std::uint32_t rank, std::uint64_t since);
  // Wakes the sleeping engines among `peers`. To be called after a release store that they wait for.
  void ring_peers() const;
  // For how long the rank's engine has not made a round, if that is so long that it must be stopped or
  // blocked; else 0. Judged by its page, from this process. `bell_ns`: its bell has been ringing since then,
  // so it should have made a round.
  std::uint64_t stands_still_ms(std::uint32_t rank, std::uint64_t now_ns, std::uint64_t bell_ns) const;
  std::string check_complete() const;  // what is missing at a commit; "" if nothing is
};

}  // namespace epd::engine
