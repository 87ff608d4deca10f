// The operations in flight, from the submission that was admitted to its completion: stepped in turns, each
// until it waits, ended by what the device says, by their deadlines, or with their group.
#pragma once

#include "round_clock.h"
#include "schedule.h"
#include "supervisor_link.h"

#include <cstddef>
#include <cstdint>

namespace epd::engine {

class Operations {
 public:
  Operations(Page& page, SupervisorLink& link, const RoundClock& clock, device::Launcher& launcher)
      : page_(page), link_(link), clock_(clock), launcher_(launcher) {}

  // Takes a submission up that its session has recorded as taken: a collective has the member's next number.
  void start(Member& member, const abi::Submission& submission, std::uint32_t timeout_ms);
  // A round's share of steps. True: the next round may go on at once.
  bool step();

  // Of the group: what all ranks have completed is completed here, though nobody may have looked yet.
  void finish_arrived(const Group& group);
  // They end with `cause` when the device has left them: those from operation `from` on, and those that have
  // been abandoned.
  void fail(const Group& group, std::uint64_t from, const abi::Break& cause);
  // Of a member that goes; they have been abandoned, and the device has left them.
  void end(const Member& member, const abi::Break& cause);
  void abandon_all();
  void clear() { schedule_.clear(); }

  bool has(std::uint64_t session_id) const { return schedule_.has(session_id); }
  // Whether step() would get on.
  bool runnable() const;
  std::uint64_t next_look_ns(std::uint64_t now_ns) const;
  // A collective in flight that is of another group; null: none.
  const Operation* in_flight_beside(const Group& group) const;

 private:
  bool take_turn(Schedule::Queue& queue, std::int32_t first, std::uint64_t until_ns);
  bool end_if_done(Operation& operation, StepResult result);
  StepResult step(Operation& operation, std::int32_t first);
  void show(Operation& operation);
  void finish(const Operation& operation, StatusCode status, const abi::Break& cause);

  Page& page_;
  SupervisorLink& link_;
  const RoundClock& clock_;
  device::Launcher& launcher_;
  Schedule schedule_;
  std::size_t idle_turns_ = 0;  // of sessions, one after another, in which nothing got on
};

}  // namespace epd::engine
