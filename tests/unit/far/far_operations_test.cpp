// Operations of groups whose ranks are on several nodes: bit for bit what the specification says, wherever
// the ranks are. A failure prints its case; EPD_TEST_SEED=N gives other cases.
#include "far_nodes.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

namespace epd::test {
namespace {

std::uint64_t base_seed() {
  const char* seed = std::getenv("EPD_TEST_SEED");
  return seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10);
}

using Nodes = std::vector<std::uint32_t>;

const transport::FaultRates kFaults{10, 30, 30, 5, 0, 40};

FarOptions random_options(const Nodes& nodes, std::mt19937& random) {
  FarOptions options;
  options.nodes = nodes;
  // One engine on each node, or one for each rank.
  const bool together = random() % 2 == 0;
  for (std::uint32_t rank = 0; rank < nodes.size(); ++rank)
    options.engines.push_back(together ? 100 + nodes[rank] : 200 + rank);
  constexpr std::uint32_t kBatches[] = {256, 1024, 4096, 65536};
  options.batch_bytes = kBatches[random() % 4];
  options.window_bytes = options.batch_bytes * (2 + random() % 3);
  options.sms = 1 + random() % 3;
  options.seed = random();
  return options;
}

struct Totals {
  std::uint32_t cases = 0;
  std::uint32_t operations = 0;
};

void run_case(const Case& c, const FarOptions& options, std::uint32_t breaks, std::mt19937& random,
              Totals& totals) {
  const std::vector<FarStep> steps = random_steps(c, 6 + random() % 10, random);
  FarNodes nodes(c, options);
  const std::string wrong = nodes.run_with_breaks(steps, breaks);
  ASSERT_EQ(wrong, "") << nodes.describe();
  ASSERT_EQ(nodes.settle(), "") << nodes.describe();
  if (breaks == 0) {
    ASSERT_EQ(nodes.dropped(), 0u) << nodes.far_of(0).drops().text() << "; " << nodes.describe();
  }
  ++totals.cases;
  totals.operations += static_cast<std::uint32_t>(steps.size());
}

Case far_case(std::uint64_t seed, std::uint32_t ranks, std::mt19937& random) {
  Case c = random_case(seed, ranks);
  c.bound = 0;
  c.defer = false;
  if (random() % 2 == 0) c.num_handles = c.depth;
  return c;
}

// The same case on each placement. `faults`: messages are late, in another order, and refused.
void run_places(std::uint32_t ranks, const std::vector<Nodes>& places, std::uint32_t cases, bool faults) {
  Totals totals;
  for (std::uint32_t i = 0; i < cases; ++i) {
    std::mt19937 random(static_cast<std::uint32_t>(base_seed() * 7919 + i));
    const Case c = far_case(base_seed() * 1000 + i, ranks, random);
    for (const Nodes& nodes : places) {
      FarOptions options = random_options(nodes, random);
      if (faults) options.faults = kFaults;
      run_case(c, options, 0, random, totals);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  std::cout << totals.cases << " cases, " << totals.operations << " operations of " << ranks
            << " ranks, seed " << base_seed() << '\n';
}

const std::vector<Nodes> kFourRanks = {{0, 0, 0, 0}, {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 2, 3}};

TEST(FarSamePlaces, FourRanksOnOneToFourNodes) {
  run_places(4, kFourRanks, 200, false);
}
TEST(FarSamePlaces, FourRanksOverABadTransport) {
  run_places(4, kFourRanks, 60, true);
}
TEST(FarSamePlaces, RanksOfNodesThatAreNotNeighbours) {
  run_places(6, {{0, 1, 0, 1, 0, 1}, {2, 0, 1, 1, 0, 2}, {0, 0, 1, 2, 0, 0}}, 40, true);
}
TEST(FarSamePlaces, TwoAndThreeRanks) {
  run_places(2, {{0, 1}}, 40, true);
  run_places(3, {{0, 1, 2}, {1, 0, 1}}, 40, true);
}

// Masked ranks send nothing, get nothing and are nobody's gateways.
TEST(FarSamePlaces, WithMaskedRanks) {
  Totals totals;
  for (std::uint32_t i = 0; i < 60; ++i) {
    std::mt19937 random(static_cast<std::uint32_t>(base_seed() * 104729 + i));
    const Case c = far_case(base_seed() * 5000 + i, 5, random);
    FarOptions options = random_options({0, 0, 1, 1, 2}, random);
    options.masked = {i % 5};
    if (i % 3 == 0) options.masked = {0, 2};
    options.faults = kFaults;
    run_case(c, options, 0, random, totals);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Everything is aborted at random moments. Messages of the epochs before still arrive.
TEST(FarBreaks, WhatWasAbortedIsDoneAgainAndNothingIsLeft) {
  Totals totals;
  for (std::uint32_t i = 0; i < 100; ++i) {
    std::mt19937 random(static_cast<std::uint32_t>(base_seed() * 15485863 + i));
    const Case c = far_case(base_seed() * 9000 + i, 4, random);
    FarOptions options = random_options(kFourRanks[1 + i % 3], random);
    options.faults = kFaults;
    run_case(c, options, 1 + random() % 4, random, totals);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace epd::test
