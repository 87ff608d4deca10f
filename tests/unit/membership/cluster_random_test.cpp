// Groups that span nodes under random events and faults: clients and engines that die, engines that stand
// still, daemons that die and come back, nodes that are cut off, paused, drained, out of each other's reach,
// a coordinator that dies. EPD_TEST_SEED=N takes the seeds from N on.
#include "cluster_world.h"

#include <cstdlib>
#include <iostream>

namespace epd::membership {
namespace {

struct Kind {
  const char* name;
  ClusterOptions options;
};
void PrintTo(const Kind& kind, std::ostream* out) {
  *out << kind.name;
}

std::uint64_t first_seed() {
  const char* asked = std::getenv("EPD_TEST_SEED");
  return asked == nullptr ? 1 : std::strtoull(asked, nullptr, 10);
}

class RandomCluster : public testing::TestWithParam<std::tuple<Kind, std::uint64_t>> {};

TEST_P(RandomCluster, EveryRequestIsAnsweredAndEveryGroupServesOrEnds) {
  const auto& [kind, number] = GetParam();
  const std::uint64_t seed = first_seed() + number;
  SCOPED_TRACE("EPD_TEST_SEED=" + std::to_string(seed) + " (the first of the cases)");
  ClusterWorld world(seed, kind.options);
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
    Seeds, RandomCluster,
    testing::Combine(testing::Values(Kind{"TwoNodes", {2, LossPolicy::kFailFast, false}},
                                     Kind{"TwoNodesDegrade", {2, LossPolicy::kDegrade, false}},
                                     Kind{"ThreeNodesDegrade", {3, LossPolicy::kDegrade, false}},
                                     Kind{"FourNodes", {4, LossPolicy::kFailFast, true}},
                                     Kind{"ThreeNodesLate", {3, LossPolicy::kDegradeLate, false}},
                                     Kind{"FourNodesDegrade", {4, LossPolicy::kDegrade, true}}),
                     testing::Range<std::uint64_t>(0, 20)),
    name_of);

}  // namespace
}  // namespace epd::membership
