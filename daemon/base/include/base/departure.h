// How a thread gets its own descriptor table with some of its starter's descriptors.
#pragma once

#include "base/own_table.h"

#include <atomic>
#include <cstdint>
#include <span>

namespace epd {

// A thread leaves its starter's table and keeps some descriptors. Then the starter closes its own copies,
// which are not the last references, and lets the thread run.
class Departure {
 public:
  // Called by the thread. False: it could not leave, and must end.
  bool leave(std::span<const int> keep) { return wait(own_table::leave(keep)); }
  bool leave_sorted(std::span<const int> keep) { return wait(own_table::leave_sorted(keep)); }
  // Called by the starter.
  bool has_left() {
    state_.wait(kStarting);
    return state_.load() == kLeft;
  }
  void permit() { set(kMayGo); }
  void try_again() { state_.store(kStarting); }

 private:
  bool wait(bool left) {
    set(left ? kLeft : kFailed);
    if (left) state_.wait(kLeft);
    return left;
  }
  enum State : std::uint32_t { kStarting, kLeft, kFailed, kMayGo };
  void set(State state) {
    state_.store(state);
    state_.notify_one();
  }
  std::atomic<std::uint32_t> state_{kStarting};
};

}  // namespace epd
