// The group protocol under random events: sessions that come, leave and die, engines that die, stand still
// and come back, messages that cross. On one node nothing is delayed but what engines are told and say;
// between nodes everything is.
#include "membership_world.h"

namespace epd::membership {
namespace {

struct Run {
  const char* name;
  std::uint32_t nodes;
  bool at_once;
  bool echoes;
  bool spans = false;
};
void PrintTo(const Run& run, std::ostream* out) {
  *out << run.name;
}

class RandomMembership : public testing::TestWithParam<std::tuple<Run, std::uint64_t>> {
 protected:
  void run(LossPolicy policy) {
    const auto& [how, seed] = GetParam();
    SCOPED_TRACE("seed " + std::to_string(seed));
    WorldOptions options;
    options.nodes = how.nodes;
    options.at_once = how.at_once;
    options.echoes = how.echoes;
    options.spans = how.spans;
    options.policy = policy;
    options.kind = seed % 2 == 0 && !how.spans ? abi::DeviceKind::kCuda : abi::DeviceKind::kHost;
    options.conflict_ms = seed % 3 == 0 ? 250 : 0;
    World world(seed, options);
    for (int turn = 0; turn < (how.spans ? 1'200 : 400); ++turn) {
      world.step();
      if (HasFatalFailure()) return;
    }
    world.settle();
    world.check_settled();
    world.close_all_sessions();
    world.settle();
    world.check_empty();
  }
};

TEST_P(RandomMembership, UnderDegradeEveryRequestIsAnsweredAndNoGroupIsStuck) {
  run(LossPolicy::kDegrade);
}
TEST_P(RandomMembership, AndWhereLateRanksAreLost) {
  run(LossPolicy::kDegradeLate);
}
TEST_P(RandomMembership, AndUnderFailFast) {
  run(LossPolicy::kFailFast);
}

std::string name_of(const testing::TestParamInfo<std::tuple<Run, std::uint64_t>>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(OneNode, RandomMembership,
                         testing::Combine(testing::Values(Run{"AtOnce", 1, true, false}),
                                          testing::Range<std::uint64_t>(1, 101)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Nodes, RandomMembership,
                         testing::Combine(testing::Values(Run{"OneFarNode", 1, false, false},
                                                          Run{"TwoNodes", 2, false, false},
                                                          Run{"ThreeNodes", 3, false, false},
                                                          Run{"ThreeNodesWithEchoes", 3, false, true}),
                                          testing::Range<std::uint64_t>(1, 41)),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Spanning, RandomMembership,
                         testing::Combine(testing::Values(Run{"TwoNodes", 2, false, false, true},
                                                          Run{"ThreeNodes", 3, false, false, true},
                                                          Run{"TwoNodesAtOnce", 2, true, false, true}),
                                          testing::Range<std::uint64_t>(1, 81)),
                         name_of);

}  // namespace
}  // namespace epd::membership
