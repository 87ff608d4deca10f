// Groups until all their ranks have joined and all their engines serve them.
#pragma once

#include "arrivals.h"
#include "breaks.h"
#include "desk.h"
#include "members.h"
#include "membership/group.h"
#include "steps.h"

namespace epd::membership {

class Forming {
 public:
  Forming(Desk& desk, Arrivals& arrivals, Members& members, Steps& steps, Breaks& breaks)
      : desk_(desk), arrivals_(arrivals), members_(members), steps_(steps), breaks_(breaks) {}

  // Nobody is in its way.
  Status join(Group& group, const JoinRequest& request);
  // Of a rank whose memory has come, or can't be had. May forget the group.
  void settle(Group& group, const MemoryAcquired& event);
  // Is active if all engines are ready.
  void engine_ready(Group& group);
  // All its ranks are refused. May forget the group.
  void abort_start(Group& group, const Status& status);
  // A rank goes that nobody waits for any more.
  void lose(Group& group, std::uint32_t rank);
  void session_closed(Group& group, SessionId session);
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
