// Groups of one node and groups that span nodes under random events and faults: clients and engines that die,
// engines that are stopped, daemons that die and come back, nodes that are cut off, paused, drained, out of
// each other's reach, a coordinator that dies. EPD_TEST_SEED=N takes the seeds from N on.
#include "world.h"

#include <cstdlib>
#include <iostream>

namespace epd::membership {
namespace {

struct Kind {
  const char* name;
  WorldOptions options;
};
void PrintTo(const Kind& kind, std::ostream* out) {
  *out << kind.name;
}

std::uint64_t first_seed() {
  const char* asked = std::getenv("EPD_TEST_SEED");
  return asked == nullptr ? 1 : std::strtoull(asked, nullptr, 10);
}

class RandomMembership : public testing::TestWithParam<std::tuple<Kind, std::uint64_t>> {};

TEST_P(RandomMembership, EveryRequestIsAnsweredAndEveryGroupServesOrEnds) {
  const auto& [kind, number] = GetParam();
  const std::uint64_t seed = first_seed() + number;
  SCOPED_TRACE("EPD_TEST_SEED=" + std::to_string(seed) + " (the first of the cases)");
  WorldOptions options = kind.options;
  options.conflict_ms = seed % 3 == 0 ? 250 : 0;
  options.echoes = seed % 2 == 0 && !options.spans;
  World world(seed, options);
  world.run_ms(60'000);
  if (HasFatalFailure()) return;
  world.settle_ms(20'000);
  world.check_settled();
  if (kind.options.coordinator_dies) {
    world.evict_as_the_coordinator_dies();
    world.settle_ms(20'000);
    world.check_settled();
  }
  world.close_all_sessions();
  world.settle_ms(10'000);
  world.check_empty();
  if (std::getenv("EPD_TEST_VERBOSE") != nullptr) {
    for (const auto& [what, count] : world.counts) std::cout << count << " " << what << "; ";
    std::cout << "\n";
  }
}

std::string name_of(const testing::TestParamInfo<std::tuple<Kind, std::uint64_t>>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(
    Seeds, RandomMembership,
    testing::Combine(
        testing::Values(
            Kind{"OneNode", {1, LossPolicy::kFailFast, false, false, 6}},
            Kind{"OneNodeDegrade", {1, LossPolicy::kDegrade, false, false, 6}},
            Kind{"OneNodeLate", {1, LossPolicy::kDegradeLate, false, false, 6}},
            Kind{"OneNodeCuda", {1, LossPolicy::kFailFast, false, false, 6, abi::DeviceKind::kCuda}},
            Kind{"OneNodeCudaDegrade", {1, LossPolicy::kDegrade, false, false, 6, abi::DeviceKind::kCuda}},
            Kind{"OneNodeCudaLate", {1, LossPolicy::kDegradeLate, false, false, 6, abi::DeviceKind::kCuda}},
            Kind{"TwoNodes", {2, LossPolicy::kFailFast}}, Kind{"TwoNodesDegrade", {2, LossPolicy::kDegrade}},
            Kind{"ThreeNodesDegrade", {3, LossPolicy::kDegrade}},
            Kind{"FourNodes", {4, LossPolicy::kFailFast, true}},
            Kind{"ThreeNodesLate", {3, LossPolicy::kDegradeLate}},
            Kind{"FourNodesDegrade", {4, LossPolicy::kDegrade, true}}),
        testing::Range<std::uint64_t>(0, 40)),
    name_of);

}  // namespace
}  // namespace epd::membership
