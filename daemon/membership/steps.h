// What one engine of a group is told next, and by when it has to answer. At most one kBreak is unanswered for
// each engine and kind, so that a kBroken is never ambiguous.
#pragma once

#include "desk.h"
#include "membership/group.h"
#include "nodes.h"

#include <cstdint>
#include <set>

namespace epd::membership {

class Steps {
 public:
  Steps(Desk& desk, const Nodes& nodes) : desk_(desk), nodes_(nodes) {}

  // Of the group, if it is up; else when it is.
  void start(Group& group, EngineId engine);
  // A failing group's is fatal.
  void send_break(Group& group, EngineId engine);
  // To those that have broken and still serve a rank: the new epoch. `reason_changed`: since kBreak told it.
  void resume(Group& group, bool reason_changed);
  // Ranks that came or went, to those that have broken; engines without a living rank forget the group.
  void send_changes(Group& group, const std::set<std::uint32_t>& changed);
  // The address of an engine that has started anew, to those of the group's engines that are not told yet.
  void introduce(const Group& group, EngineId engine, std::set<EngineId>& told);
  // Another engine is silent; the clients of these need not wait for it to be told that they have failed.
  void release_failed(Group& group);
  void send_removal(Group& group, EngineId engine);
  // To all that know of the group. False: none does.
  bool send_removals(Group& group);
  // Streams that wait for what no engine will run.
  void close_streams(const Group& group, EngineId engine);
  // On the boards of its ranks, which no engine serves any more.
  void mark_lost(const Group& group, EngineId engine);

 private:
  void introduce(EngineId engine, EngineId to);
  GroupDescription describe_to(const Group& group, EngineId engine) const;

  Desk& desk_;
  const Nodes& nodes_;
};

}  // namespace epd::membership
