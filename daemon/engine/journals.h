// The ranks of this device whose operations are calls: what the device says in their journals that it has
// done, and when those of a lost group are to stop.
#pragma once

#include "group.h"
#include "round_clock.h"
#include "sessions.h"

#include <cstdint>
#include <vector>

namespace epd::engine {

class Journals {
 public:
  Journals(Page& page, SupervisorLink& link, Sessions& sessions, const RoundClock& clock)
      : page_(page), link_(link), sessions_(sessions), clock_(clock) {}

  // A member that has calls, until it is taken out, which must be before they go.
  void add(Member& member) { members_.push_back(&member); }
  void remove(const Member& member) { std::erase(members_, &member); }

  // True: there was something.
  bool read();
  bool read(Member& member);
  void read(const Group& group);
  // In each round. A group that is lost may still complete what every rank has begun (Break::fail_from): as
  // long as calls end, and a little longer.
  void halt_lost();

  // Whether read() would find something.
  bool pending() const;
  std::uint64_t next_look_ns(std::uint64_t now_ns) const;
  // A member of another group of whose calls one runs; null: none is known to.
  const Member* running_beside(const Group& group) const;

 private:
  void read_entry(Member& member, const kernels::cuda::JournalEntry& entry);
  StatusCode fail_call(Member& member, const kernels::cuda::JournalEntry& entry);

  Page& page_;
  SupervisorLink& link_;
  Sessions& sessions_;
  const RoundClock& clock_;
  std::vector<Member*> members_;
};

}  // namespace epd::engine
