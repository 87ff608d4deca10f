// Ranks that leave, die, are evicted, or can't be served, and what that means for their group.
#pragma once

#include "breaks.h"
#include "forming.h"
#include "joins.h"
#include "steps.h"
#include "tables.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace epd::membership {

class Departures {
 public:
  struct Parts {
    GroupTable& groups;
    Nodes& nodes;
    Memberships& memberships;
    Members& members;
    Breaks& breaks;
    Forming& forming;
    Rejoins& rejoins;
    Joins& joins;
  };
  Departures(Desk& desk, const Parts& parts) : desk_(desk), parts_(parts) {}

  void on(const LeaveRequest& event);
  void on(const SessionClosed& event);
  void on(const EvictRank& event);
  void on(const RankRefused& event);
  void on(const NodeLost& event);
  // Under degrade_late, a rank that misses a deadline is lost. False: the event reports no such rank. May
  // forget the group.
  bool lose_late(const BreakRequested& event);
  // Puts out nodes that the group's others can't reach: their ranks are lost in one break, and their clients
  // hear of it. May forget the group.
  void put_out(Group& group, const std::set<std::uint32_t>& nodes, const std::string& how);
  // The ranks of an engine that refuses to serve the group again are lost. May forget the group.
  void cannot_serve(Group& group, EngineId engine, const Status& status);
  // Refuses, and loses, ranks that have not come back in time. May forget the group.
  void expire_rejoins(Group& group);

 private:
  void forget_waiting(const EndedSessions& ended);
  void forget_waiting(Group& group, const EndedSessions& ended);
  // These may forget the group.
  void lose(Group& group, Member& member, const std::string& how);
  void lose(Group& group, const std::vector<std::uint32_t>& ranks, BreakReason reason);
  void lose_some(Group& group, const std::vector<std::uint32_t>& ranks, BreakReason reason);
  void put_out(Group& group, const std::vector<std::uint32_t>& ranks, const Status& joining,
               const std::string& text);
  void forget_engines(Group& group, std::uint32_t node);
  void node_lost(Group& group, std::uint32_t node, const std::string& how);

  Desk& desk_;
  const Parts parts_;
};

}  // namespace epd::membership
