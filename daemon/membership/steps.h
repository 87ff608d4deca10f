// Single steps: of one rank on its way out of its group, and of one engine of a group.
#pragma once

#include "membership/group.h"
#include "tables.h"

#include <cstdint>
#include <set>

namespace epd::membership {

// One rank's way out of its group: its calls end, its memory is given up, its number becomes free.
class Members {
 public:
  Members(Desk& desk, const Nodes& nodes, Memberships& memberships)
      : desk_(desk), nodes_(nodes), memberships_(memberships) {}

  // Ends the rank's calls. Its engine is asked for the index of the next one, if it can know it.
  void stop(const Group& group, Member& member);
  // The rank's calls have ended. Answers a leave that waits for it.
  void has_stopped(Member& member, std::uint64_t next_submit);
  void reply_joined(const Group& group, const Member& member);
  void refuse_join(const Member& member, const Status& status) { desk_.refuse(member.join_id(), status); }
  void release_memory(const Group& group, Member& member);
  // Frees all that the member has. No engine knows it any more.
  void end(const Group& group, Member& member);
  // Drops an arrival. Only its node knows of it.
  void drop(const Group& group, const Arrival& arrival);

 private:
  void tell_evicted(const Group& group, const Member& member);

  Desk& desk_;
  const Nodes& nodes_;
  Memberships& memberships_;
};

// The next message to one engine of a group, and the deadline of its answer. At most one kBreak is unanswered
// for each engine and kind, so a kBroken is never ambiguous.
class Steps {
 public:
  Steps(Desk& desk, const Nodes& nodes) : desk_(desk), nodes_(nodes) {}

  // Tells the engine of the group, if it is up. Otherwise the engine is told when it comes up.
  void start(Group& group, EngineId engine);
  // The break is fatal if the group is failing.
  void send_break(Group& group, EngineId engine);
  // Tells engines that have broken and still serve a rank of the new epoch. `reason_changed`: since their
  // kBreak.
  void resume(Group& group, bool reason_changed);
  // Tells engines that have broken which ranks came or went. Engines without a living rank forget the group.
  void send_changes(Group& group, const std::set<std::uint32_t>& changed);
  // Tells the group's engines, unless in `told`, the address of an engine that has restarted.
  void introduce(const Group& group, EngineId engine, std::set<EngineId>& told);
  // Lets clients see failed operations now, though another engine is silent.
  void release_failed(Group& group);
  void send_removal(Group& group, EngineId engine);
  // Tells all engines that know the group to forget it. False: none does.
  bool send_removals(Group& group);
  // Releases streams that wait for operations that no engine will run.
  void close_streams(const Group& group, EngineId engine);
  // Writes the loss to the boards of the engine's ranks, which no engine serves any more.
  void mark_lost(const Group& group, EngineId engine);

 private:
  void introduce(EngineId engine, EngineId to);
  GroupDescription describe_to(const Group& group, EngineId engine) const;

  Desk& desk_;
  const Nodes& nodes_;
};

}  // namespace epd::membership
