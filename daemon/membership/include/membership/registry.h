// All groups of this daemon, and the protocol by which they form, break, recover and end, as a pure
// state machine: events in, actions out, time injected. README of daemon/ draws it.
//
// Threads: none of its own; the supervisor's loop calls it.
#pragma once

#include "base/clock.h"
#include "base/quota.h"
#include "membership/actions.h"
#include "membership/group.h"
#include "proto/arena.h"

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace epd::membership {

struct MembershipLimits {
  std::uint32_t max_groups = 256;
  std::uint32_t join_timeout_ms = 60'000;
  std::uint32_t engine_ack_ms = 3'000;     // kStopMember, recoverable kBreak, kRemoveGroup
  std::uint32_t engine_start_ms = 10'000;  // kGroupCommit until kGroupReady
  std::uint32_t operation_ms = 30'000;     // a fatal kBreak may wait for operations to end, so: ack + this
  std::uint64_t last_epoch = abi::kLastEpoch;
  std::uint32_t conflict_ms = 0;  // a join that others are in the way of is tried again for so long
};

class GroupRegistry {
 public:
  static constexpr std::uint32_t kMaxMembershipsPerSession = 256;
  static constexpr std::size_t kMaxConflictsPerSession = 8;

  GroupRegistry(const Clock& clock, MemberMemory& memory, const MembershipLimits& limits)
      : clock_(clock), memory_(memory), limits_(limits) {}

  void set_limits(const MembershipLimits& limits) { limits_ = limits; }

  // From clients. Each join and leave is answered by exactly one Reply action, now or later, unless its
  // session closes first. A join to a degraded group that runs takes a lost rank's place.
  void join(const JoinRequest& request);
  void leave(std::uint64_t session_id, std::uint32_t request_id, std::uint32_t member);
  // The daemon admits nobody any more: joins that others are in the way of are refused.
  void refuse_conflicts(const Status& status);
  // `how`: "died", "detached", "was ended: ...".
  void session_closed(std::uint64_t session_id, const std::string& how);

  // The rank is lost as if it had left; `how` says so to the others. A join that waits is refused with it.
  // The rank must be there and not gone.
  void evict(std::uint64_t group_id, std::uint32_t rank, const std::string& how);

  // From engines. engine_up: kReady has come and its sessions have been told to it.
  void engine_up(std::uint32_t device);
  void engine_down(std::uint32_t device, const std::string& text);
  void group_ready(std::uint32_t device, const abi::GroupReady& message);
  // The engine lives, and its answer takes longer than it is to blame for.
  void group_waits(std::uint32_t device, const abi::GroupWaits& message);
  void member_stopped(std::uint32_t device, const abi::MemberRef& message);
  void break_requested(std::uint32_t device, const abi::Break& message);
  void broken(std::uint32_t device, const abi::Broken& message);
  void resumed(std::uint32_t device, const abi::Resumed& message);
  void group_removed(std::uint32_t device, const abi::GroupRef& message);
  // A rank's own memory can't be used by the engine: a group that starts is refused, one that runs loses it.
  void rank_refused(std::uint32_t device, const abi::RankRefused& message);

  // Deals with what is due. Call at next_due_ns() or later (UINT64_MAX: nothing will be due).
  void tick();
  std::uint64_t next_due_ns() const;

  Actions take_actions() { return std::exchange(actions_, {}); }

  const std::map<std::uint64_t, Group>& groups() const { return groups_; }
  std::uint32_t memberships(std::uint64_t session_id) const;

 private:
  using GroupName = std::pair<std::uint32_t, std::string>;  // uid, name
  struct MemberPlace {                                      // one index of a session's membership table
    std::uint32_t generation = 0;
    std::uint64_t group_id = 0;  // 0 = free
    std::uint32_t rank = 0;
  };

  // registry.cpp: forming, leaving, forgetting
  Status check_alone(const JoinRequest& request) const;
  Status try_join(const JoinRequest& request);
  Result<std::uint32_t> pick_rank(const Group& group, std::int32_t wanted) const;
  Status add_member(Group& group, std::uint32_t rank, const JoinRequest& request);
  Status check_group_quotas(const JoinRequest& request) const;
  Status check_reach(const Group& group, const JoinRequest& request) const;
  Group* find_named(std::uint32_t uid, const std::string& name);
  void start(Group& group);
  void abort_start(Group& group, const Status& status);
  void expire_join(Group& group);
  void expire_start(Group& group);
  void tick_running(Group& group);
  void lose_member(std::uint64_t group_id, std::uint32_t rank, const std::string& how);
  void drop_name(const Group& group);
  void release_memory(Group& group, Member& member);
  void tell_evicted(const Group& group, const Member& member);
  void end_membership(Group& group, Member& member);
  void forget(std::uint64_t group_id);
  MemberPlace* place_of(std::uint64_t session_id, std::uint32_t member);

  // conflicts.cpp: joins that others are in the way of
  Status in_the_way(const Group& group, const JoinRequest& request) const;
  bool put_aside(const JoinRequest& request, const std::string& name);
  void forget_conflicts(std::uint64_t session_id);
  void mark_conflicts(const Group& group);
  std::uint64_t next_conflict_ns() const;
  void retry_conflicts();

  // breaks.cpp: the break protocol
  void stop_member(Group& group, Member& member);
  void member_has_stopped(Member& member, std::uint64_t next_submit);
  void begin_break(Group& group, BreakReason reason, std::set<std::uint32_t> changed = {});
  void begin_failing(Group& group, BreakReason reason, std::uint64_t fail_from = kNever);
  void advance(Group& group);
  void resume(Group& group);
  void send_fatal(Group& group, Group::Failing& failing);
  void fail_everything(Group& group);
  void send_break(Group& group, std::uint32_t device);
  void become_lost(Group& group);
  void remove_if_empty(Group& group);
  void send_removal(Group& group, std::uint32_t device);
  void send_removals(Group& group);
  void mark_members_lost(Group& group, std::uint32_t device);

  // degrade.cpp: ranks that go and come back
  void lose_rank(Group& group, Member& member, BreakReason reason);
  Status rejoin(Group& group, const JoinRequest& request);
  void admit_waiting(Group& group);
  Result<std::uint32_t> admit(Group& group, const JoinRequest& request);
  void tell_changes(Group& group, const std::set<std::uint32_t>& changed);
  void expire_rejoins(Group& group);
  void refuse_joining(Group& group);
  void release_failed(Group& group);
  void slot_free(Group& group, std::uint32_t device);
  void reply_joined(const Group& group, const Member& member);

  // engines.cpp: engines that come and go
  void tell_engine(Group& group, std::uint32_t device, EngineSlot& slot);
  void engine_down_for(Group& group, std::uint32_t device, const std::string& text);
  void close_streams(const Group& group, std::uint32_t device);
  EngineSlot* slot_of(std::uint64_t group_id, std::uint32_t device);
  bool is_up(std::uint32_t device) const { return device < up_.size() && up_[device]; }

  std::uint64_t due_in_ms(std::uint64_t ms) const { return clock_.now_ns() + ms * 1'000'000; }
  template <typename T>
  void emit(T action) {
    actions_.emplace_back(std::move(action));
  }
  std::vector<std::uint64_t> group_ids() const;

  const Clock& clock_;
  MemberMemory& memory_;
  MembershipLimits limits_;
  std::uint64_t next_group_id_ = 1;
  std::map<std::uint64_t, Group> groups_;
  std::map<GroupName, std::uint64_t> names_;  // groups that may be joined or named
  std::map<std::uint64_t, std::vector<MemberPlace>> sessions_;
  std::map<GroupName, GroupConflicts> conflicts_;
  std::vector<bool> up_;
  Actions actions_;
};

}  // namespace epd::membership
