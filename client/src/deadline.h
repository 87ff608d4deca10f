// Points in time after which a call gives up, and the timeouts that callers give.
#pragma once

#include "errors.h"

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
  // For a call that waits, with a timeout_ms that has passed check_wait.
  static Deadline of_wait(std::int32_t timeout_ms) {
    if (timeout_ms == EPD_NO_WAIT) return at(SteadyClock::now());
    return timeout_ms == 0 ? in_ms(EPD_FOREVER) : in_ms(timeout_ms);
  }
  bool passed() const { return !forever_ && SteadyClock::now() >= at_; }
  // The end of the first of so many equal parts of the time left.
  Deadline first_of(std::size_t parts) const {
    return forever_ ? *this : at(SteadyClock::now() + remaining(nanoseconds::max()) / parts);
  }
  // The time left, at most `slice`; zero once passed.
  nanoseconds remaining(nanoseconds slice) const {
    if (forever_) return slice;
    const nanoseconds left = at_ - SteadyClock::now();
    return left <= nanoseconds::zero() ? nanoseconds::zero() : (left < slice ? left : slice);
  }

 private:
  SteadyClock::time_point at_{};
  bool forever_ = false;
};

// Checks the timeout_ms of a call that needs an end. `otherwise` says what 0 means.
inline Status check_limit(std::int32_t timeout_ms, const std::string& otherwise) {
  if (timeout_ms >= 0) return {};
  return bad_value("timeout_ms", timeout_ms, "1 or more milliseconds, or 0 (" + otherwise + ")");
}
// Checks the timeout_ms of a call that waits for operations or a group.
inline Status check_wait(std::int32_t timeout_ms) {
  if (timeout_ms >= 0 || timeout_ms == EPD_FOREVER || timeout_ms == EPD_NO_WAIT) return {};
  return bad_value("timeout_ms", timeout_ms,
                   "1 or more milliseconds, EPD_FOREVER (-1, or 0) or EPD_NO_WAIT (-2)");
}

inline timespec to_timespec(nanoseconds duration) {
  return {static_cast<time_t>(duration.count() / 1'000'000'000),
          static_cast<long>(duration.count() % 1'000'000'000)};
}

}  // namespace epd::client
