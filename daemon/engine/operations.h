// The operations in flight, from admission to completion. They are stepped by turns, each until it waits.
// They end when the device says so, at their deadlines, or with their group.
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

  // Starts a submission that its session has recorded as taken. A collective gets the member's next number.
  void start(Member& member, const abi::Submission& submission, std::uint32_t timeout_ms);
  // Does a share of steps. True: the next round may continue at once.
  bool step();

  // Completes those operations of the group that all ranks have completed, even if nobody has looked yet.
  void finish_arrived(const Group& group);
  // Operations from `from` on, and abandoned ones, end with `cause` when the device has left them.
  void fail(const Group& group, std::uint64_t from, const abi::Break& cause);
  void fail(const Member& member, std::uint64_t from, const abi::Break& cause);
  // Ends the operations of a member that is removed. They have been abandoned, and the device has left them.
  void end(const Member& member, const abi::Break& cause);
  void abandon_all();
  void clear() { schedule_.clear(); }

  bool any() const { return !schedule_.empty(); }
  bool has(std::uint64_t session_id) const { return schedule_.has(session_id); }
  // Whether step() would make progress.
  bool runnable() const;
  std::uint64_t next_deadline_ns() const;

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
  std::size_t idle_turns_ = 0;  // consecutive turns of sessions without progress
};

}  // namespace epd::engine
