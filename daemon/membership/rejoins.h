// Ranks that come back to a degraded group. A rank comes in a recoverable break of its own, together with all
// others that wait: while every engine stands still it is told what has changed, then all move to the next
// epoch.
#pragma once

#include "arrivals.h"
#include "breaks.h"
#include "desk.h"
#include "membership/group.h"
#include "nodes.h"
#include "steps.h"

#include <vector>

namespace epd::membership {

class Rejoins {
 public:
  Rejoins(Desk& desk, const Nodes& nodes, Arrivals& arrivals, Steps& steps, Breaks& breaks)
      : desk_(desk), nodes_(nodes), arrivals_(arrivals), steps_(steps), breaks_(breaks) {}

  // Whether it can be is known now, except for the memory; when, only if the group does not break just now.
  Status join(Group& group, const JoinRequest& request);
  // A rank that lives, or a late one, asks that the late ones come back: they do when all of them have asked.
  Status restore(Group& group, const JoinRequest& request);
  void settle(Group& group, const MemoryAcquired& event);
  // Those whose engine is up, if the group runs.
  void admit(Group& group);
  void sessions_closed(Group& group, const EndedSessions& ended);
  // Refuses those that have waited long enough for the break to begin.
  void expire(Group& group, const Status& status);
  // A session has left the rank that it was too late for. False: it has no such rank.
  bool forget_late(Group& group, SessionId session, std::uint32_t member);

 private:
  // A rank is lost because it was late, its session goes on, and it is not coming back already.
  static bool is_any_late(const Group& group);
  // DEADLINE_EXCEEDED: some ranks are late, and not all of them and of those that live have asked.
  Status check_all_ask(const Group& group) const;
  // epoch: in which no rank is late.
  void answer_asked(Group& group, std::uint64_t epoch);
  void begin_break(Group& group);
  // restores: also late ranks.
  std::vector<std::uint32_t> take_arrived(Group& group, bool restores);

  Desk& desk_;
  const Nodes& nodes_;
  Arrivals& arrivals_;
  Steps& steps_;
  Breaks& breaks_;
};

}  // namespace epd::membership
