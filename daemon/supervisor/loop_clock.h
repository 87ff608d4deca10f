// The clock by which the loop's deadlines are set and checked.
//
// It advances only when the loop reads it: after a sleep, before the loop reads what has come. So a turn
// judges deadlines as of a moment before which everything that others had sent has been read. An answer that
// lies in its socket is never late.
//
// Time in which the loop is stopped (its process was stopped, the machine was, or a call blocked) hardly
// counts. Such a pause shows when the loop wakes later than it meant to. Then the loop can't know what others
// have done, and they may have been stopped as well. A pause can begin in the loop's sleep and be longer than
// it shows, so the same time is subtracted again. At least kLateNs count each time, so the clock always
// advances.
//
// A deadline may therefore pass later than CLOCK_MONOTONIC says, and up to kLateNs earlier after a turn that
// took so long. Times of other processes (heartbeats) must be compared with the other clock.
#pragma once

#include "base/clock.h"

namespace epd::supervisor {

class LoopClock final : public Clock {
 public:
  static constexpr std::uint64_t kLateNs = 100'000'000;

  explicit LoopClock(const Clock& real) : real_(real), looked_ns_(real.now_ns()), now_ns_(looked_ns_) {}

  std::uint64_t now_ns() const override { return now_ns_; }
  // Called by the loop, in its thread. `wanted_ns` is how long it meant to sleep, at most, since the last
  // call.
  void look(std::uint64_t wanted_ns);

 private:
  const Clock& real_;
  std::uint64_t looked_ns_;  // on the real clock
  std::uint64_t now_ns_;
};

}  // namespace epd::supervisor
