#include "far_steps.h"

namespace epd::test {

std::vector<FarStep> random_steps(const Case& c, std::uint32_t count, std::mt19937& random) {
  struct Slot {
    std::uint32_t record = 0;
    std::uint64_t routing = 0;
    Round last{0};
    int combines = 0;  // since the last dispatch
    bool used = false;
  };
  std::vector<Slot> slots(c.depth);
  std::vector<FarStep> steps;
  std::uint64_t data = 0;
  while (steps.size() < count) {
    const auto s = static_cast<std::uint32_t>(random() % c.depth);
    Slot& slot = slots[s];
    const std::uint32_t what = random() % 4;
    FarStep step;
    step.slot = s;
    if (!slot.used || (slot.combines > 0 && what < 2)) {
      slot.used = true;
      slot.record = c.num_handles > s && random() % 2 == 0 ? c.depth + s : s;
      slot.routing = data % kRoundsThatFit;
      slot.last = Round(data++, slot.routing);
      slot.combines = 0;
    } else if (what == 0) {
      step.cached = true;
      slot.last = Round(data++, slot.routing);
      slot.combines = 0;
    } else {
      step.dispatch = false;
      ++slot.combines;
    }
    step.record = slot.record;
    step.round = slot.last;
    steps.push_back(step);
  }
  return steps;
}

}  // namespace epd::test
