// One rank's way out of its group: its calls end, its memory is given up, its number becomes free.
#pragma once

#include "desk.h"
#include "membership/group.h"
#include "memberships.h"
#include "nodes.h"

#include <cstdint>

namespace epd::membership {

class Members {
 public:
  Members(Desk& desk, const Nodes& nodes, Memberships& memberships)
      : desk_(desk), nodes_(nodes), memberships_(memberships) {}

  // No more calls are taken; its engine is asked which would have been the next, if it can know.
  void stop(const Group& group, Member& member);
  // A leave that waits for it is answered.
  void has_stopped(Member& member, std::uint64_t next_submit);
  void reply_joined(const Group& group, const Member& member);
  void refuse_join(const Member& member, const Status& status) { desk_.refuse(member.join_id(), status); }
  void release_memory(const Group& group, Member& member);
  // No engine knows it any more.
  void end(const Group& group, Member& member);
  // Its rank has been taken, and nobody but its node knows of it.
  void drop(const Group& group, const Arrival& arrival);

 private:
  void tell_evicted(const Group& group, const Member& member);

  Desk& desk_;
  const Nodes& nodes_;
  Memberships& memberships_;
};

}  // namespace epd::membership
