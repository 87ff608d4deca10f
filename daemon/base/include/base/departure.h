// How a thread gets a descriptor table of its own, with some of its starter's descriptors in it.
#pragma once

#include "base/own_table.h"

#include <atomic>
#include <cstdint>
#include <span>

namespace epd {

// A thread leaves its starter's table with what it is to keep; the starter then closes its own, which are not
// the last, and lets it go.
class Departure {
 public:
  // The thread's side. False: it could not leave, and must end.
  bool leave(std::span<const int> keep) { return wait(own_table::leave(keep)); }
  bool leave_sorted(std::span<const int> keep) { return wait(own_table::leave_sorted(keep)); }
  // The starter's.
  bool has_left() {
    state_.wait(kStarting);
    return state_.load() == kLeft;
  }
  void let_go() { set(kMayGo); }
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
