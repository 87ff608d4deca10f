#include "loop_clock.h"

#include <algorithm>

namespace epd::supervisor {

void LoopClock::look(std::uint64_t wanted_ns) {
  const std::uint64_t real_ns = real_.now_ns();
  const std::uint64_t passed_ns = real_ns - looked_ns_;
  looked_ns_ = real_ns;
  const std::uint64_t late_ns = passed_ns > wanted_ns ? passed_ns - wanted_ns : 0;
  if (late_ns <= kLateNs) {
    now_ns_ += passed_ns;
  } else {
    now_ns_ += std::max(kLateNs, wanted_ns - std::min(wanted_ns, late_ns));
  }
}

}  // namespace epd::supervisor
