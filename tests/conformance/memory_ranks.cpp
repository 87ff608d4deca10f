#include "memory_ranks.h"

namespace epd::test::callers_memory {

std::vector<Region> regions_in(std::uint32_t set, const Case& c) {
  std::vector<Region> regions;
  for (std::uint32_t i = 0; i < abi::kNumRegions; ++i) {
    const auto region = static_cast<Region>(i);
    if ((set >> i & 1) != 0 && abi::region_bytes(c.shape(), region) != 0) regions.push_back(region);
  }
  return regions;
}

}  // namespace epd::test::callers_memory
