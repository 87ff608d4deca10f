// The ranks of this device whose operations are calls: reads what the device has done from their journals,
// and halts the calls of a lost group in time.
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

  // A member that has calls. It must be removed before its calls are destroyed.
  void add(Member& member) { members_.push_back(&member); }
  void remove(const Member& member) { std::erase(members_, &member); }

  // Once in each round. True: there was at least one entry.
  bool read();
  bool read(Member& member);
  void read(const Group& group);
  // Called in each round. A lost group may still complete what every rank has begun (Break::fail_from). It
  // may do so while calls end, and a little longer.
  void halt_lost();

  // Whether read() would find an entry.
  bool pending() const;
  std::uint64_t next_look_ns(std::uint64_t now_ns) const;

 private:
  void read_entry(Member& member, const kernels::JournalEntry& entry);
  StatusCode fail_call(Member& member, const kernels::JournalEntry& entry);
  void break_overdue(const Member& member);

  Page& page_;
  SupervisorLink& link_;
  Sessions& sessions_;
  const RoundClock& clock_;
  std::vector<Member*> members_;
  bool busy_ = false;  // an operation runs on a host device
  std::uint64_t last_round_ns_ = 0;
};

}  // namespace epd::engine
