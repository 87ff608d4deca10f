// Points in time after which a call gives up.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

namespace epd::client {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

class Deadline {
 public:
  // Negative: never.
  static Deadline in_ms(std::int64_t timeout_ms) {
    Deadline deadline;
    deadline.forever_ = timeout_ms < 0;
    if (!deadline.forever_) deadline.at_ = SteadyClock::now() + std::chrono::milliseconds(timeout_ms);
    return deadline;
  }
  static Deadline at(SteadyClock::time_point when) {
    Deadline deadline;
    deadline.at_ = when;
    return deadline;
  }
  bool passed() const { return !forever_ && SteadyClock::now() >= at_; }
  // At most `slice`; zero once passed.
  nanoseconds remaining(nanoseconds slice) const {
    if (forever_) return slice;
    const nanoseconds left = at_ - SteadyClock::now();
    return left <= nanoseconds::zero() ? nanoseconds::zero() : (left < slice ? left : slice);
  }

 private:
  SteadyClock::time_point at_{};
  bool forever_ = false;
};

inline timespec to_timespec(nanoseconds duration) {
  return {static_cast<time_t>(duration.count() / 1'000'000'000),
          static_cast<long>(duration.count() % 1'000'000'000)};
}

}  // namespace epd::client
