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
  void settle(Group& group, const MemoryAcquired& event);
  // Those whose engine is up, if the group runs.
  void admit(Group& group);
  void sessions_closed(Group& group, const EndedSessions& ended);
  // Refuses those that have waited long enough for the break to begin.
  void expire(Group& group, const Status& status);

 private:
  void begin_break(Group& group);
  std::vector<std::uint32_t> take_arrived(Group& group);

  Desk& desk_;
  const Nodes& nodes_;
  Arrivals& arrivals_;
  Steps& steps_;
  Breaks& breaks_;
};

}  // namespace epd::membership
