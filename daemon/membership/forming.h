// Groups until all their ranks have joined and all their engines serve them.
#pragma once

#include "arrivals.h"
#include "breaks.h"
#include "desk.h"
#include "members.h"
#include "membership/group.h"
#include "steps.h"

#include <cstdint>
#include <vector>

namespace epd::membership {

class Forming {
 public:
  struct Parts {
    Arrivals& arrivals;
    Members& members;
    Steps& steps;
    Breaks& breaks;
  };
  Forming(Desk& desk, const Parts& parts)
      : desk_(desk),
        arrivals_(parts.arrivals),
        members_(parts.members),
        steps_(parts.steps),
        breaks_(parts.breaks) {}

  // Nobody is in its way.
  Status join(Group& group, const JoinRequest& request);
  // Of a rank whose memory has come, or can't be had. May forget the group.
  void settle(Group& group, const MemoryAcquired& event);
  // Is active if all engines are ready.
  void engine_ready(Group& group);
  // All its ranks are refused. May forget the group.
  void abort_start(Group& group, const Status& status);
  // Ranks go that nobody waits for any more. May forget the group.
  void lose(Group& group, const std::vector<std::uint32_t>& ranks);
  void sessions_closed(Group& group, const EndedSessions& ended);
  // What is due. May forget the group.
  void tick(Group& group);

 private:
  void start(Group& group);
  void forget_if_empty(Group& group);
  void expire_join(Group& group);
  void expire_start(Group& group);

  Desk& desk_;
  Arrivals& arrivals_;
  Members& members_;
  Steps& steps_;
  Breaks& breaks_;
};

}  // namespace epd::membership
