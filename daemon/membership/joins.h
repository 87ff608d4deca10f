#pragma once

#include "breaks.h"
#include "forming.h"
#include "membership/group.h"
#include "steps.h"
#include "tables.h"

#include <cstdint>
#include <map>
#include <vector>

namespace epd::membership {

// Ranks that come back to a degraded group. All that wait come in one recoverable break: while every engine
// is stopped it is told what has changed, then all move to the next epoch.
class Rejoins {
 public:
  Rejoins(Desk& desk, const Nodes& nodes, Arrivals& arrivals, Steps& steps, Breaks& breaks)
      : desk_(desk), nodes_(nodes), arrivals_(arrivals), steps_(steps), breaks_(breaks) {}

  // Refuses a join that is impossible. A possible one waits for its memory, and for the end of a break.
  Status join(Group& group, const JoinRequest& request);
  // A living or a late rank asks that the late ranks come back. They do when all have asked.
  Status restore(Group& group, const JoinRequest& request);
  void settle(Group& group, const MemoryAcquired& event);
  // Admits joins whose engine is up, if the group runs.
  void admit(Group& group);
  void sessions_closed(Group& group, const EndedSessions& ended);
  // Refuses those that have waited long enough for the break to begin.
  void expire(Group& group, const Status& status);
  // A session has left the rank that it was too late for. False: it has no such rank.
  bool forget_late(Group& group, SessionId session, std::uint32_t member);

 private:
  // Whether a rank was lost because it was late, still has its session, and is not coming back already.
  static bool is_any_late(const Group& group);
  // DEADLINE_EXCEEDED: ranks are late, and not all of them and of the living ranks have asked.
  Status check_all_ask(const Group& group) const;
  // `epoch`: the first in which no rank is late.
  void answer_asked(Group& group, std::uint64_t epoch);
  void begin_break(Group& group);
  // `restores`: late ranks come too.
  std::vector<std::uint32_t> take_arrived(Group& group, bool restores);

  Desk& desk_;
  const Nodes& nodes_;
  Arrivals& arrivals_;
  Steps& steps_;
  Breaks& breaks_;
};

// Joins that are possible at once, and joins that conflict with present members. Each connection is read by a
// thread of its own. So the join of a process that replaces an ended one may come before the end of the old
// session. A join that conflicts is therefore tried again for a moment.
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
  std::map<SessionId, std::size_t> of_session_;  // the number of conflicts of each session
};

}  // namespace epd::membership
