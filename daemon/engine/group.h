// A group as one engine sees it: everybody's arenas, and the members that this device serves.
#pragma once

#include "common/memory.h"
#include "device/launcher.h"
#include "far_side.h"
#include "group_life.h"
#include "proto/link.h"
#include "route_heads.h"
#include "stats.h"

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace epd::engine {

class Calls;
class Operation;
class SessionPort;

// A rank's memory. Its regions lie in its user arena or where its client has bound them.
struct GroupRankMemory {
  std::shared_ptr<device::Arena> user;                 // also kept by the kernel that looks at its call words
  std::shared_ptr<device::Arena> exchange;             // also kept by a lane that looks at its signals
  std::vector<std::unique_ptr<device::Arena>> client;  // its client's own
  std::uint32_t device_index = 0;

  // As the device's operations reach it; empty while the rank is not active.
  kernels::cuda::PeerView view;

  // Once the memory is there. The bindings' `memory` is at most client.size().
  void place_regions(const abi::GroupShape& shape, const abi::Bindings& bindings);
  void set_active(std::uint64_t since);  // 0: it is not
  // The only place that knows where a region is.
  const kernels::cuda::RegionPlace& region(abi::Region region) const {
    return places_[static_cast<std::size_t>(region)];
  }
  std::byte* at(std::uint32_t slot, abi::Region region) const {
    return this->region(region).at<std::byte>(slot);
  }
  std::byte* ready_word(std::uint32_t slot) const { return user->bytes() + layout_.ready_word(slot); }
  std::byte* done_word(std::uint32_t slot) const { return user->bytes() + layout_.done_word(slot); }
  std::byte* stream_words() const { return user->bytes() + layout_.words; }
  std::byte* call_words() const { return user->bytes() + layout_.calls; }
  std::uint64_t user_bytes() const { return layout_.total_bytes; }

 private:
  abi::UserArenaLayout layout_{abi::GroupShape{1, 1, 1, 128, 1, 1, {}, {}, {}}};
  std::array<kernels::cuda::RegionPlace, abi::kNumRegions> places_{};
};

// An engine to ring; several ranks, and groups, share one.
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
  std::byte* user(std::uint32_t slot, abi::Region region) const;
  std::byte* exchange() const;
  // Selections that the dispatch saved in the record dropped; 0 if there is none.
  std::uint32_t saved_dropped(std::uint32_t record) const;
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
  void publish_counts(std::uint32_t slot, std::uint64_t ticket, const kernels::Placement& placement) const;
  // It submits no more, and has no say in where the others go on.
  void stop();
  bool stopped() const { return stopped_; }
  // An operation that was asked to say so reads its inputs no more.
  void publish_sent(std::uint32_t slot, std::uint64_t ticket) const;

  Group& group;
  const std::uint32_t rank;
  const std::uint32_t number;  // as in submissions
  SessionPort* session;        // null once removed
  Mapping board_mapping;
  std::uint64_t first_index = 0;           // the operation with which this rank came
  std::uint64_t next_number = 0;           // of the next operation
  std::uint64_t failed_from = kNoFailure;  // lowest that failed in this epoch: to be done again
  std::set<std::uint64_t> inflight;        // numbers of operations not completed
  struct SlotUse {
    std::uint32_t operations = 0;  // in flight on the slot; more than one only if all are a stream's
    bool of_stream = false;
    std::uint64_t ticket = 0;  // of the last
  };
  std::vector<SlotUse> slot_use;           // [depth]
  std::unique_ptr<device::Lane> lane;      // null: it could not be opened, or the group was lost
  std::unique_ptr<RouteHeads> heads;       // with the lane
  kernels::cuda::GroupView view;           // likewise
  std::vector<Operation*> operations;      // that have not ended, in the order of submission
  std::shared_ptr<device::Arena> results;  // if its operations are calls (abi::Results)
  std::unique_ptr<Calls> calls;            // then, of its lane. next_number: of the first not completed
  Statistics statistics;

 private:
  bool stopped_ = false;
};

struct Group {
  // `far`: of a group whose ranks are on several nodes; else null.
  Group(const abi::GroupBegin& message, std::unique_ptr<FarSide> far_side);

  const std::uint64_t id;
  const abi::GroupShape shape;
  const abi::ExchangeArenaLayout exchange_layout;
  std::uint32_t sms;      // of its device that an operation may use; 0 = all
  std::int32_t priority;  // among the device's groups, higher first
  std::uint64_t epoch;
  std::uint64_t resume_index;  // first operation of the epoch
  GroupLife life;
  std::uint64_t owed_since_ns = 0;
  std::uint64_t say_waits_ns = 0;  // when the supervisor is told what they wait for, if they have not begun
  bool waits_logged = false;
  Status unusable;                                 // why this device can't serve it
  std::uint64_t broken_ns = 0;                     // when the break under way came
  abi::Break cause{};                              // of the break under way, or of the last
  std::vector<GroupRankMemory> ranks;              // [R]; emptied when lost
  std::vector<std::uint64_t> active_since;         // [R] epoch in which the rank came; 0 = masked
  std::set<std::uint32_t> refused;                 // masked here alone, until the supervisor says more
  std::vector<std::uint8_t> masked;                // [R] active_since as a mask; empty while no rank is
  std::uint64_t changed_epoch = 0;                 // in which a rank was last masked or replaced
  std::vector<std::shared_ptr<PeerEngine>> peers;  // engines of the group on this node, each once
  std::unique_ptr<FarSide> far;                    // null: all ranks are on this node. Outlives lanes
  std::vector<std::unique_ptr<Member>> members;

  // An operation's number of this epoch as tags, blocks and routing records have it, and back.
  std::uint64_t in_tags(std::uint64_t index) const { return index - abi::tag_base(resume_index); }
  std::uint64_t from_tags(std::uint64_t number) const { return number + abi::tag_base(resume_index); }
  bool active(std::uint32_t rank) const { return active_since[rank] != 0; }
  // Whether it is on this node, and so its memory is here.
  bool is_near(std::uint32_t rank) const { return far == nullptr || far->is_near(rank); }
  // Whether the rank holds what it was sent in that epoch.
  bool serves(std::uint32_t rank, std::uint64_t since_epoch) const {
    return active(rank) && active_since[rank] <= since_epoch;
  }
  bool has_operations() const {
    return std::any_of(members.begin(), members.end(),
                       [](const auto& member) { return !member->operations.empty(); });
  }
  // Whether nothing of its members' calls runs, and the device has left their other operations.
  bool calls_halted() const;
  bool settled() const;
  Member* member(std::uint32_t rank) const;  // null: this device serves none
  // `since` 0 masks the rank. Peers that no active rank needs any more are let go. A far rank's place is
  // known.
  void set_active(std::uint32_t rank, std::uint64_t since);
  // Of its device that an operation which asks for `own` may use; 0: all, in both.
  std::uint32_t share_sms(std::uint32_t own) const {
    return own == 0 || sms == 0 ? std::max(own, sms) : std::min(own, sms);
  }
  // Wakes the sleeping engines among `peers`. After a release store that they wait for.
  void ring_peers() const;
  // How long the loop of the rank's engine has not turned, if so long that the engine must be stopped or held
  // up; else 0. Judged by its page, from here. `bell_ns`: its bell has been ringing since then, so it should
  // have turned.
  std::uint64_t stands_still_ms(std::uint32_t rank, std::uint64_t now_ns, std::uint64_t bell_ns) const;
  std::string check_complete() const;  // what a commit finds missing; "" if nothing
};

}  // namespace epd::engine
