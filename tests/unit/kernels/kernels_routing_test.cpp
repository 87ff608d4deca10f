// Properties of a routing plan over random shapes, against sets and maps.
#include "kernels/routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace epd::kernels {
namespace {

struct Shape {
  std::uint32_t tokens;
  std::uint32_t topk;
  std::uint32_t ranks;
  std::uint32_t experts;
};

std::uint32_t between(std::mt19937& random, std::uint32_t low, std::uint32_t high) {
  return std::uniform_int_distribution<std::uint32_t>(low, high)(random);
}

Shape random_shape(std::mt19937& random) {
  Shape shape{};
  shape.tokens = between(random, 0, 200);
  shape.topk = between(random, 1, 32);
  shape.ranks = between(random, 0, 3) == 0 ? between(random, 65, 1024) : between(random, 1, 64);
  shape.experts = shape.ranks * between(random, 1, 4096 / shape.ranks);
  return shape;
}

// Every negative number is no selection, also one whose low half would be an expert.
std::int64_t no_selection(std::mt19937& random) {
  constexpr std::int64_t kValues[] = {-1, -2, INT32_MIN, INT64_MIN, -(std::int64_t{1} << 32) + 1};
  return kValues[between(random, 0, 4)];
}

std::vector<std::int64_t> random_choices(std::mt19937& random, const Shape& shape) {
  std::vector<std::int64_t> choices(std::size_t{shape.tokens} * shape.topk);
  const std::uint32_t none_in = between(random, 1, 10);
  const std::uint32_t span = between(random, 0, 2) == 0 ? std::min(shape.experts, 3u) : shape.experts;
  for (auto& choice : choices) {
    choice = between(random, 0, none_in) == 0 ? no_selection(random) : between(random, 0, span - 1);
  }
  return choices;
}

struct Options {
  bool per_expert = false;
  bool index64 = false;
  std::vector<bool> masked;  // [R] or empty
  std::uint32_t piece = 0;   // tokens planned at a time; 0: all
};

RoutingError build(const Shape& shape, const std::vector<std::int64_t>& choices, const Options& options,
                   RoutingPlan& plan) {
  std::vector<std::int32_t> narrow;
  for (const std::int64_t choice : choices)
    narrow.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(choice, INT32_MIN)));
  const auto masked = std::make_unique<std::uint8_t[]>(options.masked.size());
  std::copy(options.masked.begin(), options.masked.end(), masked.get());
  RoutingInput input;
  input.topk_idx = options.index64 ? static_cast<const void*>(choices.data()) : narrow.data();
  input.index64 = options.index64;
  input.per_expert = options.per_expert;
  input.num_tokens = shape.tokens;
  input.topk = shape.topk;
  input.num_ranks = shape.ranks;
  input.num_experts = shape.experts;
  input.masked = {masked.get(), options.masked.size()};
  if (options.piece == 0) return build_routing_plan(input, plan);
  RoutingPlanner planner(input, plan);
  while (!planner.advance(options.piece)) {
  }
  return planner.error();
}

// The expected plan, by maps and sets.
struct Expected {
  PlanArray<std::uint32_t> begin = {0};
  std::vector<RouteEntry> entries;
  std::map<std::uint32_t, std::uint32_t> tokens_to_rank;
  std::map<std::uint32_t, std::uint32_t> selections;
  std::map<std::uint32_t, std::uint32_t> rows_to_expert;
  PlanArray<std::int32_t> topk;
  std::uint32_t dropped = 0;
};

Expected expected_plan(const Shape& shape, const std::vector<std::int64_t>& choices, const Options& options) {
  Expected plan;
  for (std::uint32_t token = 0; token < shape.tokens; ++token) {
    std::map<std::uint32_t, std::vector<std::uint32_t>> experts_of_rank;  // in order of k, each once
    for (std::uint32_t k = 0; k < shape.topk; ++k) {
      const std::int64_t value = choices[std::size_t{token} * shape.topk + k];
      plan.topk.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(value, -1)));
      if (value < 0) continue;
      const auto expert = static_cast<std::uint32_t>(value);
      const std::uint32_t rank = expert / (shape.experts / shape.ranks);
      if (!options.masked.empty() && options.masked[rank]) {
        plan.topk.back() = -1;
        ++plan.dropped;
        continue;
      }
      ++plan.selections[expert];
      std::vector<std::uint32_t>& experts = experts_of_rank[rank];
      if (std::find(experts.begin(), experts.end(), expert) == experts.end()) experts.push_back(expert);
    }
    for (const auto& [rank, experts] : experts_of_rank) {
      const std::uint32_t position = plan.tokens_to_rank[rank]++;
      if (!options.per_expert) plan.entries.push_back({rank, position});
      for (const std::uint32_t expert : experts) {
        const std::uint32_t row = plan.rows_to_expert[expert]++;
        if (options.per_expert) plan.entries.push_back({expert, row});
      }
    }
    plan.begin.push_back(static_cast<std::uint32_t>(plan.entries.size()));
  }
  return plan;
}

void expect_plan(const Shape& shape, const std::vector<std::int64_t>& choices, const Options& options,
                 const RoutingPlan& plan) {
  Expected expected = expected_plan(shape, choices, options);
  ASSERT_EQ(plan.num_tokens(), shape.tokens);
  EXPECT_EQ(plan.per_expert, options.per_expert);
  EXPECT_EQ(plan.num_dropped, expected.dropped);
  EXPECT_EQ(plan.begin, expected.begin);
  ASSERT_EQ(plan.entries.size(), expected.entries.size());
  for (std::size_t i = 0; i < expected.entries.size(); ++i) {
    ASSERT_EQ(plan.entries[i].target, expected.entries[i].target) << "entry " << i;
    ASSERT_EQ(plan.entries[i].position, expected.entries[i].position) << "entry " << i;
  }
  ASSERT_EQ(plan.rank_counts.size(), shape.ranks);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
    EXPECT_EQ(plan.rank_counts[rank], expected.tokens_to_rank[rank]) << rank;
  ASSERT_EQ(plan.expert_counts.size(), shape.experts);
  auto& counts = options.per_expert ? expected.rows_to_expert : expected.selections;
  for (std::uint32_t e = 0; e < shape.experts; ++e) EXPECT_EQ(plan.expert_counts[e], counts[e]) << e;
  EXPECT_EQ(plan.topk, expected.topk);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    std::uint32_t selections = 0;
    for (std::uint32_t e = 0; e < shape.experts / shape.ranks; ++e)
      selections += expected.selections[rank * (shape.experts / shape.ranks) + e];
    EXPECT_EQ(plan.selections_of(rank), selections) << rank;
  }
}

Options random_options(std::mt19937& random, const Shape& shape) {
  Options options;
  options.per_expert = between(random, 0, 1) == 0;
  options.index64 = between(random, 0, 1) == 0;
  options.piece = between(random, 0, 5);
  if (between(random, 0, 2) == 0) {
    for (std::uint32_t r = 0; r < shape.ranks; ++r) options.masked.push_back(between(random, 0, 2) == 0);
  }
  return options;
}

TEST(RoutingOfTokens, RandomShapes) {
  RoutingPlan plan;  // reused: nothing of an earlier plan may remain
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const Shape shape = random_shape(random);
    const std::vector<std::int64_t> choices = random_choices(random, shape);
    const Options options = random_options(random, shape);
    ASSERT_FALSE(build(shape, choices, options, plan).bad);
    expect_plan(shape, choices, options, plan);
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST(RoutingOfTokens, EveryExpertFindsItsRank) {
  RoutingPlan plan;
  for (std::uint32_t experts_per_rank = 1; experts_per_rank <= 300; ++experts_per_rank) {
    const std::uint32_t ranks = 4096 / experts_per_rank;
    const Shape shape{ranks * experts_per_rank, 1, ranks, ranks * experts_per_rank};
    std::vector<std::int64_t> choices(shape.tokens);
    for (std::uint32_t e = 0; e < shape.experts; ++e) choices[e] = e;
    ASSERT_FALSE(build(shape, choices, {}, plan).bad);
    for (std::uint32_t e = 0; e < shape.experts; ++e) ASSERT_EQ(plan.entries[e].target, e / experts_per_rank);
  }
}

TEST(RoutingOfTokens, BadValuesAreNamed) {
  RoutingPlan plan;
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    Shape shape = random_shape(random);
    shape.tokens = between(random, 1, 50);
    std::vector<std::int64_t> choices = random_choices(random, shape);
    Options options = random_options(random, shape);
    const bool index64 = options.index64 = seed % 2 == 0;
    const std::vector<std::int64_t> bad_values = {std::int64_t{shape.experts}, 4097, 0x7fffffff, 0x40000000};
    std::int64_t bad = bad_values[seed / 2 % bad_values.size()];
    // A 64-bit value whose low half is legal must not pass.
    if (index64 && seed % 8 == 4) bad = (std::int64_t{1} << 32) + 0;
    if (index64 && seed % 8 == 6) bad = 0x00000000ffffffff;
    const std::uint32_t token = between(random, 0, shape.tokens - 1);
    const std::uint32_t k = between(random, 0, shape.topk - 1);
    choices[std::size_t{token} * shape.topk + k] = bad;
    choices.back() =
        token + 1 == shape.tokens && k + 1 == shape.topk ? bad : 5000;  // a later one is not the first
    const RoutingError error = build(shape, choices, options, plan);
    ASSERT_TRUE(error.bad);
    EXPECT_EQ(error.token, token);
    EXPECT_EQ(error.k, k);
    EXPECT_EQ(error.value, bad);
    EXPECT_EQ(plan.num_tokens(), 0u) << "a refused plan must route nothing";
    EXPECT_TRUE(plan.entries.empty());
    EXPECT_EQ(plan.num_dropped, 0u);
  }
}

}  // namespace
}  // namespace epd::kernels
