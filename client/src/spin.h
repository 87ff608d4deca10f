// How long a waiter polls before it sleeps: longer while polling finds something, not at all while it does
// not.
#pragma once

#include "deadline.h"

#include <sched.h>

namespace epd::client {

// One thread at a time.
class SpinBudget {
 public:
  SpinBudget();

  // Calls look() until it is true or the budget is used up.
  template <typename Look>
  bool spin(Look look) {
    if (budget_ == nanoseconds::zero()) return look();
    const SteadyClock::time_point end = SteadyClock::now() + budget_;
    do {
      for (int i = 0; i < kLooksPerClock; ++i) {
        if (look()) {
          grow();
          return true;
        }
        relax();
      }
    } while (SteadyClock::now() < end);
    shrink();
    return false;
  }

  // A sleep ended by news after `duration`. A short sleep means that the other side is fast: most of it may
  // have been the two wake-ups, which polling avoids.
  void slept(nanoseconds duration) {
    if (duration < kShortSleep) grow();
  }

 private:
  static constexpr int kLooksPerClock = 8;
  static constexpr nanoseconds kShortSleep = std::chrono::microseconds(100);

  void grow();
  void shrink();
  void relax() const {
    if (yields_) {
      ::sched_yield();
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  }

  nanoseconds limit_{0};
  nanoseconds budget_{0};
  bool yields_ = true;
};

}  // namespace epd::client
