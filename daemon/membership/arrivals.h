// Ranks that are about to come: which one a join takes, and the memory that is asked for it.
#pragma once

#include "common/status.h"
#include "desk.h"
#include "members.h"
#include "membership/group.h"
#include "memberships.h"
#include "nodes.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::membership {

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

}  // namespace epd::membership
