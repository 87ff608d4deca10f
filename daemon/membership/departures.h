// Ranks that leave, die, are evicted, or can't be served, and what that means for their group.
#pragma once

#include "breaks.h"
#include "desk.h"
#include "forming.h"
#include "group_table.h"
#include "joins.h"
#include "members.h"
#include "memberships.h"
#include "rejoins.h"

#include <cstdint>
#include <string>

namespace epd::membership {

class Departures {
 public:
  struct Parts {
    GroupTable& groups;
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
  // Ranks that have not come back in time are refused, and lost. May forget the group.
  void expire_rejoins(Group& group);

 private:
  void forget_waiting(SessionId session);
  // May forget the group.
  void lose(Group& group, Member& member, const std::string& how);
  void lose_one_of_many(Group& group, Member& member, BreakReason reason);

  Desk& desk_;
  const Parts parts_;
};

}  // namespace epd::membership
