// The time by which the loop's deadlines are set and judged.
//
// It moves only when the loop looks: after it has slept, before it reads what has come. So what a turn
// judges, it judges as of a moment by which all that others had sent has been read. An answer that lies in
// its socket is never late.
//
// Time in which the loop stands still (it was stopped, the machine was, a call blocked) hardly counts where
// it shows, which is by the loop's coming back later than it meant to: then it can't know what others have
// done, and they may have stood still as well. A pause can begin in the loop's sleep and be longer than that
// shows, so as much again is taken off. At least kLateNs count each time: the time never stands for good.
//
// A deadline may therefore pass later than CLOCK_MONOTONIC says, and up to kLateNs earlier, after a turn that
// took so long. What is compared with times of other processes (heartbeats) needs the other clock.
#pragma once

#include "base/clock.h"

namespace epd::supervisor {

class LoopClock final : public Clock {
 public:
  static constexpr std::uint64_t kLateNs = 100'000'000;

  explicit LoopClock(const Clock& real) : real_(real), looked_ns_(real.now_ns()), now_ns_(looked_ns_) {}

  std::uint64_t now_ns() const override { return now_ns_; }
  // By the loop, in its thread. `wanted_ns`: how long it meant to sleep, at most, since it last looked.
  void look(std::uint64_t wanted_ns);

 private:
  const Clock& real_;
  std::uint64_t looked_ns_;  // as the real clock has it
  std::uint64_t now_ns_;
};

}  // namespace epd::supervisor
