// The clock of the loop: the time now, and when the round under way began, which costs no look.
#pragma once

#include "base/clock.h"

namespace epd::engine {

// What a round spends at most on each of the link, the rings, the operations and memory that goes: it ends
// with the piece of work in hand, and the next round goes on where it was.
inline constexpr std::uint64_t kShareNs = 100'000;
inline constexpr std::uint64_t kNever = ~std::uint64_t{0};

class RoundClock final : public Clock {
 public:
  explicit RoundClock(const Clock& clock) : clock_(clock) {}

  std::uint64_t now_ns() const override { return clock_.now_ns(); }
  std::uint64_t round_ns() const { return round_ns_; }
  // By the loop.
  void begin_round() { round_ns_ = clock_.now_ns(); }

 private:
  const Clock& clock_;
  std::uint64_t round_ns_ = 0;
};

}  // namespace epd::engine
