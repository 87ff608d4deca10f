// Random operations of groups of several nodes.
#pragma once

#include "cases.h"

#include <cstdint>
#include <random>
#include <vector>

namespace epd::test {

// One operation, the same on all ranks.
struct FarStep {
  bool dispatch = true;
  bool cached = false;
  std::uint32_t slot = 0;
  std::uint32_t record = 0;
  Round round{0};
};
// Operations on all slots in an order from the seed: each slot dispatches, perhaps dispatches more by the
// same routing, combines once or twice, and begins again.
std::vector<FarStep> random_steps(const Case& c, std::uint32_t count, std::mt19937& random);

}  // namespace epd::test
