// Joins: those that can be at once, and those that members of their group are in the way of. Each connection
// is read by a thread of its own, so a process that takes the place of one that has ended may be heard of
// first: what is in its way is then a session that is about to close. Such a join is tried again for a
// moment.
#pragma once

#include "arrivals.h"
#include "desk.h"
#include "forming.h"
#include "group_table.h"
#include "membership/group.h"
#include "rejoins.h"

#include <cstdint>
#include <map>
#include <vector>

namespace epd::membership {

class Joins {
 public:
  Joins(Desk& desk, GroupTable& groups, const Arrivals& arrivals, Forming& forming, Rejoins& rejoins)
      : desk_(desk), groups_(groups), arrivals_(arrivals), forming_(forming), rejoins_(rejoins) {}

  // Takes it, puts it aside, or refuses it.
  void join(JoinRequest request);
  void on(const MemoryAcquired& event);
  void on(const NodeDrains& event);

  // One of the group's sessions closes: joins that it was in the way of are tried again by the next tick.
  void mark_conflicts(const Group& group);
  void sessions_closed(const EndedSessions& ended);
  void tick();
  std::uint64_t next_due_ns() const;

 private:
  // A join that members of its group are in the way of: they have its rank, or another shape.
  struct Conflict {
    JoinRequest request;
    std::uint64_t due_ns = 0;  // when it is refused
  };
  struct GroupConflicts {
    std::vector<Conflict> joins;
    std::uint64_t due_ns = kNever;  // of the first of them
    bool stale = false;             // a session of the group has closed since they were last tried
  };

  Status check_alone(const JoinRequest& request) const;
  Status in_the_way(const Group& group, const JoinRequest& request) const;
  Status restore(const JoinRequest& request);
  Status try_join(const JoinRequest& request);
  void refuse(const JoinRequest& request, Status status);
  bool put_aside(const JoinRequest& request);
  void uncount(const JoinRequest& request);
  void retry(const GroupName& name, GroupConflicts& conflicts);
  template <typename Test>
  void erase_conflicts(const Test& test);

  Desk& desk_;
  GroupTable& groups_;
  const Arrivals& arrivals_;
  Forming& forming_;
  Rejoins& rejoins_;
  std::map<GroupName, GroupConflicts> conflicts_;
  std::map<SessionId, std::size_t> of_session_;  // how many conflicts_ has
};

}  // namespace epd::membership
