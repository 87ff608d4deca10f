// Which experts tokens choose: the demo's gate, and routing that is generated or read from a file.
#include "kit/error.h"
#include "kit/random.h"
#include "kit/routing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>

namespace epd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// ---- gate

struct Choice {
  std::vector<std::int32_t> idx;
  std::vector<float> weights;
};

Choice choose(const kit::GateConfig& config, const std::vector<float>& scores,
              const std::vector<float>& bias) {
  Choice choice{std::vector<std::int32_t>(config.topk), std::vector<float>(config.topk)};
  kit::select_experts(config, scores, bias, choice.idx.data(), choice.weights.data());
  return choice;
}

TEST(Gate, PicksOnlyFromTheGroupsWithTheBestTwoExperts) {
  // Groups of two: {0,1} has the single best expert, {2,3} and {6,7} the best pairs.
  const kit::GateConfig config{.num_experts = 8, .topk = 2, .num_groups = 4, .groups_kept = 2, .scale = 1};
  const std::vector<float> scores{0.9f, 0.0f, 0.6f, 0.6f, 0.1f, 0.2f, 0.5f, 0.7f};
  const Choice choice = choose(config, scores, std::vector<float>(8, 0.0f));
  EXPECT_THAT(choice.idx, ElementsAre(7, 2));  // of equal scores the lower number
}

TEST(Gate, BiasCorrectsTheChoiceButNotTheWeights) {
  const kit::GateConfig config{.num_experts = 4, .topk = 2, .num_groups = 2, .groups_kept = 2, .scale = 2.5f};
  const std::vector<float> scores{0.8f, 0.2f, 0.4f, 0.3f};
  const std::vector<float> bias{0.0f, 0.9f, 0.0f, 0.0f};
  const Choice choice = choose(config, scores, bias);
  EXPECT_THAT(choice.idx, ElementsAre(1, 0));
  EXPECT_NEAR(choice.weights[0], 0.2f / 1.0f * 2.5f, 1e-6);
  EXPECT_NEAR(choice.weights[1], 0.8f / 1.0f * 2.5f, 1e-6);
}

TEST(Gate, DeepSeekShapeTakesEightExpertsFromAtMostFourGroups) {
  const kit::GateConfig config;
  kit::Random random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> scores(config.num_experts);
    for (float& score : scores) score = kit::sigmoid(random.normal());
    const Choice choice = choose(config, scores, std::vector<float>(config.num_experts, 0.0f));
    const std::set<std::int32_t> experts(choice.idx.begin(), choice.idx.end());
    std::set<std::int32_t> groups;
    for (const std::int32_t expert : experts) groups.insert(expert / 32);
    EXPECT_EQ(experts.size(), 8u);
    EXPECT_LE(groups.size(), 4u);
    EXPECT_NEAR(std::accumulate(choice.weights.begin(), choice.weights.end(), 0.0f), 2.5f, 1e-4);
  }
}

TEST(Gate, RefusesShapesWithTheAllowedValues) {
  EXPECT_EQ(kit::gate_error({}), "");
  EXPECT_THAT(kit::gate_error({.num_experts = 100}), HasSubstr("experts is 100"));
  EXPECT_THAT(kit::gate_error({.num_experts = 8, .topk = 5}), HasSubstr("1..4"));
  EXPECT_THAT(kit::gate_error({.groups_kept = 9}), HasSubstr("1..8"));
}

// ---- routing

kit::RoutingSource source_of(const std::string& name, std::uint64_t seed = 3) {
  kit::RoutingSpec spec = kit::parse_routing(name);
  spec.num_experts = 64;
  spec.topk = 4;
  spec.seed = seed;
  return kit::RoutingSource(spec);
}

Choice fill(const kit::RoutingSource& source, std::uint32_t rank, std::uint64_t iteration) {
  constexpr std::uint32_t kTokens = 200;
  Choice choice{std::vector<std::int32_t>(std::size_t{kTokens} * 4),
                std::vector<float>(std::size_t{kTokens} * 4)};
  source.fill({rank, 4, kTokens, iteration}, choice.idx.data(), choice.weights.data());
  return choice;
}

class GeneratedRouting : public testing::TestWithParam<const char*> {};

TEST_P(GeneratedRouting, IsTheSameInEveryProcessAndFreshInEveryIteration) {
  const Choice first = fill(source_of(GetParam()), 1, 5);
  const Choice again = fill(source_of(GetParam()), 1, 5);
  EXPECT_EQ(first.idx, again.idx);
  EXPECT_EQ(first.weights, again.weights);
  EXPECT_NE(first.idx, fill(source_of(GetParam()), 1, 6).idx);
  EXPECT_NE(first.idx, fill(source_of(GetParam(), 4), 1, 5).idx);
  const Choice neighbour = fill(source_of(GetParam()), 2, 5);
  const bool all_ranks_alike = std::string(GetParam()) == "one-expert";
  EXPECT_EQ(first.idx == neighbour.idx, all_ranks_alike);
}

TEST_P(GeneratedRouting, ChoosesDifferentExpertsWithWeightsThatSumToOne) {
  const Choice choice = fill(source_of(GetParam()), 0, 0);
  for (std::size_t at = 0; at < choice.idx.size(); at += 4) {
    std::set<std::int32_t> experts;
    float sum = 0;
    for (std::size_t k = at; k < at + 4; ++k) {
      ASSERT_GE(choice.idx[k], -1);
      ASSERT_LT(choice.idx[k], 64);
      if (choice.idx[k] < 0) {
        EXPECT_EQ(choice.weights[k], 0.0f);
      } else {
        EXPECT_TRUE(experts.insert(choice.idx[k]).second);
      }
      sum += choice.weights[k];
    }
    EXPECT_NEAR(sum, 1.0f, 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GeneratedRouting,
                         testing::Values("uniform", "zipf", "group-limited", "one-expert"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

double skew(const Choice& choice) {
  std::vector<int> counts(64, 0);
  for (const std::int32_t expert : choice.idx) {
    if (expert >= 0) ++counts[static_cast<std::size_t>(expert)];
  }
  const double total = std::accumulate(counts.begin(), counts.end(), 0.0);
  return *std::max_element(counts.begin(), counts.end()) * 64.0 / total;
}

TEST(Routing, SkewGrowsFromUniformToZipfToOneExpert) {
  const double uniform = skew(fill(source_of("uniform"), 0, 0));
  const double zipf = skew(fill(source_of("zipf"), 0, 0));
  EXPECT_LT(uniform, 3);
  EXPECT_GT(zipf, 2 * uniform);
  EXPECT_DOUBLE_EQ(skew(fill(source_of("one-expert"), 0, 0)), 64);
}

TEST(Routing, EveryExpertChosenWhenTopkIsAll) {
  kit::RoutingSpec spec = kit::parse_routing("zipf");
  spec.num_experts = spec.topk = 16;
  std::vector<std::int32_t> idx(16);
  std::vector<float> weights(16);
  kit::RoutingSource(spec).fill({0, 1, 1, 0}, idx.data(), weights.data());
  EXPECT_EQ(std::set<std::int32_t>(idx.begin(), idx.end()).size(), 16u);
}

TEST(RoutingFile, ReadsTextListsAndObjects) {
  std::istringstream in(
      "# three tokens\n3 1,2\n\n[0, 5]\n{\"layer\": 1, \"topk\": [7, 6, 4], \"rank\": 0}\n");
  EXPECT_THAT(kit::read_routing(in, "f", 8, 3), ElementsAre(3, 1, 2, 0, 5, -1, 7, 6, 4));
}

TEST(RoutingFile, ReadsWhatTheDemoWrites) {
  std::stringstream file;
  const std::vector<std::int32_t> first{9, 3, -1};
  const std::vector<std::int32_t> second{1, 2, 0};
  kit::write_routing_line(file, {0, 1, 2, first});
  kit::write_routing_line(file, {0, 1, 3, second});
  EXPECT_THAT(kit::read_routing(file, "f", 10, 3), ElementsAre(9, 3, -1, 1, 2, 0));
}

std::string refusal(const std::string& content) {
  std::istringstream in(content);
  try {
    (void)kit::read_routing(in, "f", 8, 2);
  } catch (const kit::ToolError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(RoutingFile, EveryNegativeNumberIsNoSelection) {
  std::istringstream in("-5 3\n[2, -9223372036854775808]\n-4294967295\n");
  EXPECT_THAT(kit::read_routing(in, "f", 8, 2), ElementsAre(-1, 3, 2, -1, -1, -1));
}

TEST(RoutingFile, RefusesBadLinesByNumberAndValue) {
  EXPECT_THAT(refusal("1 2\n1 8\n"), HasSubstr("f:2: expert 8; allowed: 0..7, or a negative number"));
  EXPECT_THAT(refusal("1 2 3\n"), HasSubstr("f:1: 3 experts; allowed: 1..2"));
  EXPECT_THAT(refusal("1 x\n"), HasSubstr("'x' is not an expert's number"));
  EXPECT_THAT(refusal("[1.5]\n"), HasSubstr("1.5 is not an expert's number"));
  EXPECT_THAT(refusal("{\"idx\": [1]}\n"), HasSubstr("no list named \"topk\""));
  EXPECT_THAT(refusal("{broken\n"), HasSubstr("not a JSON list"));
  EXPECT_THAT(refusal("# nothing\n"), HasSubstr("no token in it"));
}

}  // namespace
}  // namespace epd
