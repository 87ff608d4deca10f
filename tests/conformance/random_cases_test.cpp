// Results of groups and rounds of any kind: scripts of random cases, as the seed says.
#include "conformance.h"

namespace epd::test {
namespace {

class RandomCases : public Conformance {
 protected:
  void run(std::uint32_t num_ranks, std::uint32_t cases) {
    std::vector<Script> scripts;
    for (std::uint32_t i = 0; i < cases_here(cases); ++i) {
      Case c = random_case(base_seed() * 1000 + i, num_ranks);
      if (!on_host()) c.sum_ranks = 0;
      add_formats(c);
      ScriptOptions options;
      options.rounds = 3 + i % 3;
      options.order = static_cast<Order>(i % 5);
      c.in_streams = static_cast<std::uint32_t>((base_seed() + i) * 0x9e3779b9) >> 13;  // of some ranks
      if (options.order == Order::kTraining) c.num_handles = handles_needed(c);
      scripts.push_back({c, options});
    }
    run_scripts(scripts, 120);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, RandomCases,
                         testing::ValuesIn(kinds_here({{"host", "cuda"}, {}, {"nodes2", "nodes3"}})),
                         [](const auto& tested) { return tested.param; });

TEST_P(RandomCases, OneRank) {
  run(1, 30);
}
TEST_P(RandomCases, TwoRanks) {
  run(2, 40);
}
TEST_P(RandomCases, ThreeRanks) {
  run(3, 40);
}
TEST_P(RandomCases, FourRanks) {
  run(4, 40);
}
TEST_P(RandomCases, FiveRanksOnFourDevices) {
  run(5, 30);
}
TEST_P(RandomCases, EightRanksOnFourDevices) {
  run(8, 20);
}

}  // namespace
}  // namespace epd::test
