// The clock of the loop. It gives the time now, and, without reading a clock, the time when this round began.
#pragma once

#include "base/clock.h"

namespace epd::engine {

// The most time that a round spends on each of the link, the rings, the operations and memory to be freed.
// After that it ends with the current piece of work, and the next round continues.
inline constexpr std::uint64_t kShareNs = 100'000;
inline constexpr std::uint64_t kNever = ~std::uint64_t{0};

class RoundClock final : public Clock {
 public:
  explicit RoundClock(const Clock& clock) : clock_(clock) {}

  std::uint64_t now_ns() const override { return clock_.now_ns(); }
  std::uint64_t round_ns() const { return round_ns_; }
  // Called by the loop.
  void begin_round() { round_ns_ = clock_.now_ns(); }

 private:
  const Clock& clock_;
  std::uint64_t round_ns_ = 0;
};

}  // namespace epd::engine
