// Operations of groups whose ranks are on several nodes: bit for bit what the specification says, wherever
// the ranks are. A failure prints its case; EPD_TEST_SEED=N gives other cases.
#include "far_nodes.h"

#include "transport/ucx.h"

#include <gtest/gtest.h>

#include <unistd.h>
#include <atomic>
#include <cstdlib>
#include <iostream>

namespace epd::test {
namespace {

using engine::FarProxy;

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
    ASSERT_EQ(nodes.check_records(), "") << nodes.describe();
  }
  ++totals.cases;
  totals.operations += static_cast<std::uint32_t>(steps.size());
}

Case far_case(std::uint64_t seed, std::uint32_t ranks, std::mt19937& random) {
  Case c = random_case(seed, ranks);
  c.bound = 0;
  c.defer = false;
  if (random() % 2 == 0) c.num_handles = c.depth;
  add_formats(c);
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
  run_places(4, kFourRanks, 80, false);
}
TEST(FarSamePlaces, FourRanksOverABadTransport) {
  run_places(4, kFourRanks, 30, true);
}
TEST(FarSamePlaces, RanksOfNodesThatAreNotNeighbours) {
  run_places(6, {{0, 1, 0, 1, 0, 1}, {2, 0, 1, 1, 0, 2}, {0, 0, 1, 2, 0, 0}}, 20, true);
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

// A rank that comes in has no rows of the dispatches before. Gateways and domains are others then.
TEST(FarBreaks, RanksComeInAndOlderRoutingsAreCombined) {
  for (std::uint32_t i = 0; i < 60; ++i) {
    std::mt19937 random(static_cast<std::uint32_t>(base_seed() * 49979687 + i));
    const Case c = far_case(base_seed() * 15000 + i, 5, random);
    FarOptions options = random_options(i % 2 == 0 ? Nodes{0, 0, 1, 1, 2} : Nodes{0, 1, 0, 1, 0}, random);
    options.masked = {i % 5};
    options.faults = kFaults;
    FarNodes nodes(c, options);
    std::vector<FarStep> steps;
    for (std::uint32_t slot = 0; slot < c.depth; ++slot)
      steps.push_back({true, false, slot, slot, Round(slot)});
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    nodes.admit(i % 5);
    for (std::uint32_t slot = 0; slot < c.depth; ++slot)
      steps.push_back({false, false, slot, slot, Round(slot)});
    for (FarStep step : random_steps(c, 8, random)) {
      step.round.data += 100;
      step.round.routing = (step.round.routing + 1) % kRoundsThatFit;
      steps.push_back(step);
    }
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    ASSERT_EQ(nodes.settle(), "") << nodes.describe();
  }
}

// Ranks hold rows of a dispatch, and are replaced in the midst of its combines, one after the other, here or
// on another node. Each combine is without all that were replaced before it, and without their tokens.
TEST(FarBreaks, RanksAreReplacedOneByOneAndOlderRoutingsAreCombined) {
  for (std::uint32_t i = 0; i < 120; ++i) {
    std::mt19937 random(static_cast<std::uint32_t>(base_seed() * 86028121 + i));
    const Case c = far_case(base_seed() * 21000 + i, 4, random);
    FarOptions options = random_options(i % 2 == 0 ? Nodes{0, 1, 2, 2} : Nodes{0, 0, 1, 2}, random);
    options.faults = kFaults;
    FarNodes nodes(c, options);
    std::vector<FarStep> steps;
    for (std::uint32_t slot = 0; slot < c.depth; ++slot)
      steps.push_back({true, false, slot, slot, Round(slot)});
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    const auto combine_all = [&] {
      for (std::uint32_t slot = 0; slot < c.depth; ++slot)
        steps.push_back({false, false, slot, slot, Round(slot)});
    };
    combine_all();
    nodes.run_turns(steps, random() % 100);
    for (std::uint32_t replaced = 0; replaced < 2; ++replaced) {
      const std::uint32_t rank = random() % 4;
      nodes.mask(rank);
      if (random() % 2 == 0) nodes.run_turns(steps, random() % 200);
      options.engines[rank] = options.engines[(rank + random() % 4) % 4];
      nodes.move(rank, options.engines[rank]);
      nodes.admit(rank);
      nodes.run_turns(steps, random() % 200);
      if (random() % 2 == 0) {
        ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
        combine_all();
      }
    }
    for (FarStep step : random_steps(c, 8, random)) {
      step.round.data += 100;
      step.round.routing = (step.round.routing + 1) % kRoundsThatFit;
      steps.push_back(step);
    }
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    ASSERT_EQ(nodes.settle(), "") << nodes.describe();
  }
}

// Bodies that are not what their sender made: nothing outside of the rows that are due is written, no
// operation that ends is wrong, and when the group has begun anew everything is exact.
TEST(FarBreaks, SpoiledMessagesHurtTheirOperationsOnly) {
  constexpr abi::FarType kTypes[] = {abi::FarType::kAnnounce, abi::FarType::kRows, abi::FarType::kAsk,
                                     abi::FarType::kSums};
  std::string faults;
  for (std::uint32_t i = 0; i < 100; ++i) {
    std::mt19937 random(static_cast<std::uint32_t>(base_seed() * 86028121 + i));
    const Case c = far_case(base_seed() * 18000 + i, 4, random);
    FarOptions options = random_options(kFourRanks[1 + i % 3], random);
    FarNodes nodes(c, options);
    const std::vector<FarStep> steps = random_steps(c, 10, random);
    ASSERT_EQ(nodes.run_spoiled(steps, 3000, kTypes[i % 4], faults), "") << nodes.describe();
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    ASSERT_EQ(nodes.settle(), "") << nodes.describe();
  }
  for (const abi::FarType type : kTypes)
    EXPECT_NE(faults.find(std::string("sent ") + abi::far_type_name(type)), std::string::npos) << faults;
}

// Threads of their own own the transports.
void run_threads(const FarProxy::Open& open, std::uint32_t cases, std::uint32_t breaks) {
  Totals totals;
  for (std::uint32_t i = 0; i < cases; ++i) {
    std::mt19937 random(static_cast<std::uint32_t>(base_seed() * 32452843 + i));
    const Case c = far_case(base_seed() * 12000 + i, 4, random);
    FarOptions options = random_options(kFourRanks[1 + i % 3], random);
    options.open = open;
    run_case(c, options, breaks, random, totals);
    if (::testing::Test::HasFatalFailure()) return;
  }
  std::cout << totals.cases << " cases, " << totals.operations << " operations\n";
}

transport::Limits thread_limits() {
  transport::Limits limits;
  limits.max_body_bytes = 4 << 20;
  limits.max_sends = 8;
  return limits;
}

TEST(FarProxies, InProcess) {
  transport::Network network;
  run_threads([&network] { return network.open(thread_limits()); }, 30, 0);
}

TEST(FarProxies, InProcessWithBreaks) {
  transport::Network network;
  run_threads([&network] { return network.open(thread_limits()); }, 20, 2);
}

TEST(FarProxies, UcxOverTcp) {
  transport::UcxOptions ucx;
  ucx.devices = "lo";
  ucx.limits = thread_limits();
  const FarProxy::Open open = [ucx] { return transport::open_ucx(ucx); };
  if (const Status status = open().status(); status.code() == StatusCode::kNotFound)
    GTEST_SKIP() << status.message();
  run_threads(open, 12, 0);
}

TEST(FarProxies, ATransportThatDoesNotOpenIsAnError) {
  const auto proxy = FarProxy::start(
      []() -> Result<std::unique_ptr<transport::Transport>> {
        return Status(StatusCode::kNotFound, "no such library");
      },
      0, [] {});
  ASSERT_FALSE(proxy.ok());
  EXPECT_EQ(proxy.status().code(), StatusCode::kNotFound);
}

TEST(FarProxies, APeerThatEndsIsToldOnceAndItsMessagesComeBack) {
  transport::Network network;
  std::atomic<int> notified{0};
  const auto open = [&network] { return network.open(thread_limits()); };
  auto a = FarProxy::start(open, 0, [&notified] { ++notified; }).value();
  auto b = FarProxy::start(open, 0, [] {}).value();
  a->connect(2, b->address());
  b->connect(1, a->address());
  b.reset();
  const auto pool = std::make_shared<far::BufferPool>(64, 3);
  int downs = 0;
  for (int i = 0; i < 5000 && (downs == 0 || pool->available() != 3); ++i) {
    if (pool->available() != 0) {
      auto message = std::make_unique<far::Message>();
      message->engine = 2;
      message->body = pool->take();
      if (downs == 0) a->send(message);
    }
    FarProxy::Event event;
    while (a->next(event)) downs += event.kind == FarProxy::Event::Kind::kDown ? 1 : 0;
    ::usleep(100);
  }
  EXPECT_EQ(downs, 1);
  EXPECT_EQ(pool->available(), 3u);
  EXPECT_GT(notified.load(), 0);
}

// It sleeps: an idle proxy wakes some ten times a second.
TEST(FarProxies, AnIdleOneSleeps) {
  transport::Network network;
  auto proxy = FarProxy::start([&network] { return network.open(thread_limits()); }, 20'000, [] {}).value();
  ::usleep(100'000);
  const std::uint64_t before = proxy->sleeps();
  const auto begin = std::chrono::steady_clock::now();
  ::usleep(500'000);
  const std::uint64_t sleeps = proxy->sleeps() - before;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LE(static_cast<double>(sleeps), 20 * took.count());
}

}  // namespace
}  // namespace epd::test

// UCX reads parts of its environment before any thread runs.
int main(int argc, char** argv) {
  for (const auto& [name, value] : epd::transport::ucx_environment())
    ::setenv(name.c_str(), value.c_str(), 0);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
