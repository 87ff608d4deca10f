#include "spin.h"

#include <algorithm>

namespace epd::client {
namespace {

using std::chrono::microseconds;

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

// The engine may need this core to make progress if there are few. So each look ends with a yield, and on a
// single core there is no look.
SpinBudget::SpinBudget() {
  const int cores = usable_cores();
  yields_ = cores < 8;
  limit_ = microseconds(cores >= 2 ? 20 : 0);
  budget_ = limit_ / 4;
}

void SpinBudget::grow() {
  budget_ = std::min(limit_, budget_ + limit_ / 4);
}

void SpinBudget::shrink() {
  budget_ /= 2;
  if (budget_ < limit_ / 16) budget_ = nanoseconds::zero();
}

}  // namespace epd::client
