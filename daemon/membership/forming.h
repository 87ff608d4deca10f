#pragma once

#include "breaks.h"
#include "common/status.h"
#include "membership/group.h"
#include "steps.h"
#include "tables.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::membership {

// Ranks that are about to come: which one a join takes, and the memory that is asked for it.

// "0, 2, 5"; at most so many as a message has room for.
std::string rank_list(const std::vector<std::uint32_t>& ranks);
// "rank 3", "ranks 0, 2, 5"
std::string ranks_in_words(const std::vector<std::uint32_t>& ranks);
std::vector<std::uint32_t> missing_ranks(const Group& group);

class Arrivals {
 public:
  Arrivals(Desk& desk, const Nodes& nodes, Memberships& memberships, Members& members)
      : desk_(desk), nodes_(nodes), memberships_(memberships), members_(members) {}

  // `wanted` -1: the lowest that is free.
  Result<std::uint32_t> pick_rank(const Group& group, std::int32_t wanted) const;
  // Takes the rank and asks for its memory. The join is refused at `due_ns`.
  Status ask(Group& group, std::uint32_t rank, const JoinRequest& request, std::uint64_t due_ns);
  // False: nobody waits for this answer, or the join is refused with it.
  bool settle(Group& group, const MemoryAcquired& event);
  // Refuses all that have waited until now.
  void expire(Group& group, const Status& status);
  void sessions_closed(Group& group, const EndedSessions& ended);

 private:
  Status check_reach(const Group& group, const JoinRequest& request) const;

  Desk& desk_;
  const Nodes& nodes_;
  Memberships& memberships_;
  Members& members_;
};

// Groups until all their ranks have joined and all their engines serve them.
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
  // A rank's memory has come, or can't be had. May forget the group.
  void settle(Group& group, const MemoryAcquired& event);
  // The group becomes active if all its engines are ready.
  void engine_ready(Group& group);
  // All its ranks are refused. May forget the group.
  void abort_start(Group& group, const Status& status);
  // Removes ranks that nobody waits for any more. May forget the group.
  void lose(Group& group, const std::vector<std::uint32_t>& ranks);
  void sessions_closed(Group& group, const EndedSessions& ended);
  // Refuses joins and starts that are overdue. May forget the group.
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
