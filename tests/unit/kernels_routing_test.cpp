// Properties of a routing plan over random shapes, against sets and maps.
#include "kernels/routing.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
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

std::vector<std::int64_t> random_choices(std::mt19937& random, const Shape& shape) {
  std::vector<std::int64_t> choices(std::size_t{shape.tokens} * shape.topk);
  const std::uint32_t none_in = between(random, 1, 10);
  const std::uint32_t span = between(random, 0, 2) == 0 ? std::min(shape.experts, 3u) : shape.experts;
  for (auto& choice : choices) {
    choice = between(random, 0, none_in) == 0 ? -1 : std::int64_t{between(random, 0, span - 1)};
  }
  return choices;
}

RoutingError build(const Shape& shape, const std::vector<std::int64_t>& choices, bool index64,
                   RoutingPlan& plan) {
  const std::vector<std::int32_t> narrow(choices.begin(), choices.end());
  const void* idx = index64 ? static_cast<const void*>(choices.data()) : narrow.data();
  return build_routing_plan({idx, index64, shape.tokens, shape.topk, shape.ranks, shape.experts}, plan);
}

void expect_plan(const Shape& shape, const std::vector<std::int64_t>& choices, const RoutingPlan& plan) {
  ASSERT_EQ(plan.num_tokens(), shape.tokens);
  std::map<std::uint32_t, std::uint32_t> rows;
  std::map<std::uint32_t, std::uint32_t> selections;
  std::vector<std::uint32_t> begin = {0};
  std::vector<RouteEntry> entries;
  for (std::uint32_t token = 0; token < shape.tokens; ++token) {
    std::set<std::uint32_t> ranks;
    for (std::uint32_t k = 0; k < shape.topk; ++k) {
      const std::int64_t expert = choices[std::size_t{token} * shape.topk + k];
      if (expert < 0) continue;
      ++selections[static_cast<std::uint32_t>(expert)];
      ranks.insert(static_cast<std::uint32_t>(expert / (shape.experts / shape.ranks)));
    }
    for (const std::uint32_t rank : ranks) entries.push_back({rank, rows[rank]++});
    begin.push_back(static_cast<std::uint32_t>(entries.size()));
  }
  EXPECT_EQ(plan.begin, begin);
  ASSERT_EQ(plan.entries.size(), entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    ASSERT_EQ(plan.entries[i].rank, entries[i].rank) << "entry " << i;
    ASSERT_EQ(plan.entries[i].position, entries[i].position) << "entry " << i;
  }
  ASSERT_EQ(plan.rank_counts.size(), shape.ranks);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
    EXPECT_EQ(plan.rank_counts[rank], rows[rank]) << rank;
  ASSERT_EQ(plan.expert_counts.size(), shape.experts);
  for (std::uint32_t e = 0; e < shape.experts; ++e) EXPECT_EQ(plan.expert_counts[e], selections[e]) << e;
  EXPECT_EQ(std::vector<std::int64_t>(plan.topk.begin(), plan.topk.end()), choices);
}

TEST(Routing, RandomShapes) {
  RoutingPlan plan;  // reused: nothing of an earlier plan may remain
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const Shape shape = random_shape(random);
    const std::vector<std::int64_t> choices = random_choices(random, shape);
    const RoutingError error = build(shape, choices, seed % 2 == 0, plan);
    ASSERT_FALSE(error.bad);
    expect_plan(shape, choices, plan);
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

std::vector<std::uint8_t> random_mask(std::mt19937& random, std::uint32_t ranks) {
  std::vector<std::uint8_t> mask(ranks);
  for (auto& masked : mask) masked = between(random, 0, 2) == 0 ? 1 : 0;
  return mask;
}

// The choices without those of masked ranks; how many that were.
std::uint32_t take_out(const Shape& shape, const std::vector<std::uint8_t>& mask,
                       std::vector<std::int64_t>& choices) {
  std::uint32_t dropped = 0;
  for (auto& choice : choices) {
    if (choice < 0 || mask[static_cast<std::size_t>(choice) / (shape.experts / shape.ranks)] == 0) continue;
    choice = -1;
    ++dropped;
  }
  return dropped;
}

TEST(Routing, SelectionsOfMaskedRanksAreNoneAndCounted) {
  std::mt19937 random(20'27);
  RoutingPlan plan;
  for (int round = 0; round < 200; ++round) {
    const Shape shape = random_shape(random);
    std::vector<std::int64_t> choices = random_choices(random, shape);
    const std::vector<std::uint8_t> mask = random_mask(random, shape.ranks);
    const RoutingInput input{choices.data(), true,          shape.tokens, shape.topk,
                             shape.ranks,    shape.experts, mask};
    ASSERT_FALSE(build_routing_plan(input, plan).bad);
    EXPECT_EQ(plan.num_dropped, take_out(shape, mask, choices));
    expect_plan(shape, choices, plan);
  }
}

TEST(Routing, RowsOfRanksLostLaterGoAndTheOthersStayInTheirPlaces) {
  std::mt19937 random(20'28);
  for (int round = 0; round < 200; ++round) {
    const Shape shape = random_shape(random);
    std::vector<std::int64_t> choices = random_choices(random, shape);
    const std::vector<std::uint8_t> mask = random_mask(random, shape.ranks);
    RoutingPlan plan;
    ASSERT_FALSE(build(shape, choices, true, plan).bad);
    plan.num_dropped = 7;  // at the dispatch
    drop_ranks(mask, shape.experts, plan);
    EXPECT_EQ(plan.num_dropped, 7 + take_out(shape, mask, choices));
    expect_plan(shape, choices, plan);  // rows at a rank are counted for that rank alone
  }
}

TEST(Routing, EveryExpertFindsItsRank) {
  RoutingPlan plan;
  for (std::uint32_t experts_per_rank = 1; experts_per_rank <= 300; ++experts_per_rank) {
    const std::uint32_t ranks = 4096 / experts_per_rank;
    const Shape shape{ranks * experts_per_rank, 1, ranks, ranks * experts_per_rank};
    std::vector<std::int64_t> choices(shape.tokens);
    for (std::uint32_t e = 0; e < shape.experts; ++e) choices[e] = e;
    ASSERT_FALSE(build(shape, choices, false, plan).bad);
    for (std::uint32_t e = 0; e < shape.experts; ++e) ASSERT_EQ(plan.entries[e].rank, e / experts_per_rank);
  }
}

TEST(Routing, BadValuesAreNamed) {
  RoutingPlan plan;
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    Shape shape = random_shape(random);
    shape.tokens = between(random, 1, 50);
    std::vector<std::int64_t> choices = random_choices(random, shape);
    const bool index64 = seed % 2 == 0;
    const std::vector<std::int64_t> bad_values = {std::int64_t{shape.experts}, -2, 0x7fffffff,
                                                  -0x7fffffff - 1};
    std::int64_t bad = bad_values[seed / 2 % bad_values.size()];
    // A 64-bit value whose low half is legal must not pass.
    if (index64 && seed % 8 == 4) bad = (std::int64_t{1} << 32) + 0;
    if (index64 && seed % 8 == 6) bad = 0x00000000ffffffff;
    const std::uint32_t token = between(random, 0, shape.tokens - 1);
    const std::uint32_t k = between(random, 0, shape.topk - 1);
    choices[std::size_t{token} * shape.topk + k] = bad;
    choices.back() =
        token + 1 == shape.tokens && k + 1 == shape.topk ? bad : -5;  // a later one is not the first
    const RoutingError error = build(shape, choices, index64, plan);
    ASSERT_TRUE(error.bad);
    EXPECT_EQ(error.token, token);
    EXPECT_EQ(error.k, k);
    EXPECT_EQ(error.value, bad);
    EXPECT_EQ(plan.num_tokens(), 0u) << "a refused plan must route nothing";
    EXPECT_TRUE(plan.entries.empty());
  }
}

}  // namespace
}  // namespace epd::kernels
