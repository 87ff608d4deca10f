// Gate, routing, statistics, comparison, text and the model's arithmetic; what epbench runs.
#include "bench/overlap.h"
#include "bench/plan.h"
#include "bench/suite.h"
#include "kernels/numbers.h"
#include "kit/ceiling.h"
#include "kit/compare.h"
#include "kit/error.h"
#include "kit/gate.h"
#include "kit/random.h"
#include "kit/routing.h"
#include "kit/statistics.h"
#include "kit/team.h"
#include "model.h"
#include "multiply.h"
#include "text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <sstream>

#include <unistd.h>
#include <csignal>

namespace epd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// ---- statistics

TEST(Statistics, QuantilesInterpolateBetweenNeighbours) {
  const std::vector<double> samples{40, 10, 30, 20};
  EXPECT_DOUBLE_EQ(kit::quantile(samples, 0.0), 10);
  EXPECT_DOUBLE_EQ(kit::quantile(samples, 0.5), 25);
  EXPECT_DOUBLE_EQ(kit::quantile(samples, 1.0), 40);
  EXPECT_DOUBLE_EQ(kit::quantile(samples, 0.9), 37);
  EXPECT_DOUBLE_EQ(kit::quantile({}, 0.5), 0);
}

TEST(Statistics, SlowestRankIsTheLargestOfEachIteration) {
  const std::vector<double> samples{1, 5, 2, 9, 3, 3};  // three iterations of two ranks
  EXPECT_THAT(kit::slowest_rank(samples, 2), ElementsAre(5, 9, 3));
  const kit::Summary summary = kit::summarize(kit::slowest_rank(samples, 2));
  EXPECT_EQ(summary.count, 3u);
  EXPECT_DOUBLE_EQ(summary.min, 3);
  EXPECT_DOUBLE_EQ(summary.p50, 5);
  EXPECT_DOUBLE_EQ(summary.max, 9);
}

TEST(Statistics, WhatRanksDoTogetherLastsFromTheFirstBeginToTheLastEnd) {
  const std::vector<double> begins{10, 12, 30, 20};
  const std::vector<double> ends{11, 15, 31, 29};
  EXPECT_THAT(kit::first_to_last(begins, ends, 2), ElementsAre(5, 11));
}

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

TEST(RoutingFile, RefusesBadLinesByNumberAndValue) {
  EXPECT_THAT(refusal("1 2\n1 8\n"), HasSubstr("f:2: expert 8; allowed: -1..7"));
  EXPECT_THAT(refusal("1 2 3\n"), HasSubstr("f:1: 3 experts; allowed: 1..2"));
  EXPECT_THAT(refusal("1 x\n"), HasSubstr("'x' is not an expert's number"));
  EXPECT_THAT(refusal("[1.5]\n"), HasSubstr("1.5 is not an expert's number"));
  EXPECT_THAT(refusal("{\"idx\": [1]}\n"), HasSubstr("no list named \"topk\""));
  EXPECT_THAT(refusal("{broken\n"), HasSubstr("not a JSON list"));
  EXPECT_THAT(refusal("# nothing\n"), HasSubstr("no token in it"));
}

// ---- ceiling

kernels::reference::GroupParams params_of(std::uint32_t ranks, std::uint32_t experts, std::uint32_t hidden,
                                          std::uint32_t topk, bool fp8) {
  kernels::reference::GroupParams p;
  p.num_ranks = ranks;
  p.num_experts = experts;
  p.hidden = hidden;
  p.topk = topk;
  if (fp8) p.payload = kernels::reference::Payload::kFp8Cast;
  return p;
}

kernels::RoutingPlan plan_of(const std::vector<std::int32_t>& idx, bool per_expert) {
  kernels::RoutingInput input;
  input.topk_idx = idx.data();
  input.per_expert = per_expert;
  input.num_tokens = static_cast<std::uint32_t>(idx.size() / 2);
  input.topk = 2;
  input.num_ranks = 2;
  input.num_experts = 8;
  kernels::RoutingPlan plan;
  EXPECT_FALSE(kernels::build_routing_plan(input, plan).bad);
  return plan;
}

TEST(Ceiling, RowPlacesComeFromTheCountsOfLowerSources) {
  const std::uint32_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};  // [source][destination]
  EXPECT_THAT(kit::base_rows({counts, 3, 1}, 0), ElementsAre(0, 0, 0));
  EXPECT_THAT(kit::base_rows({counts, 3, 1}, 2), ElementsAre(5, 7, 9));
  EXPECT_EQ(kit::received_rows({counts, 3, 1}, 1), 15u);
  EXPECT_EQ(kit::rows_between({counts, 3, 1}, 1, 2), 6u);
  EXPECT_EQ(kit::dispatch_row_bytes(params_of(1, 1, 7168, 1, false)), 14336u);
  EXPECT_EQ(kit::dispatch_row_bytes(params_of(1, 1, 7168, 1, true)), 7168u + 4 * 56);
}

TEST(Ceiling, RowsOfExpertsLieOneAfterTheOther) {
  const std::uint32_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8};  // [source][rank][expert]
  EXPECT_THAT(kit::base_rows({counts, 2, 2}, 0), ElementsAre(0, 6, 0, 10));
  EXPECT_THAT(kit::base_rows({counts, 2, 2}, 1), ElementsAre(1, 8, 3, 14));
  EXPECT_EQ(kit::received_rows({counts, 2, 2}, 1), 22u);
  EXPECT_EQ(kit::rows_between({counts, 2, 2}, 1, 0), 11u);
}

TEST(Ceiling, IsTheFasterOfTwoKindsOfCopiesThatTookTurns) {
  const std::vector<double> begins{0, 1, 10, 10, 20, 20};  // two ranks: memcpy, streaming, memcpy
  const std::vector<double> ends{8, 9, 14, 13, 27, 26};
  EXPECT_DOUBLE_EQ(kit::ceiling_time_us(begins, ends, 2), 4);
  EXPECT_DOUBLE_EQ(kit::ceiling_time_us(std::span(begins).first(2), std::span(ends).first(2), 2), 9);
}

TEST(Ceiling, BothKindsCopyEveryRowOfThePlan) {
  for (const kit::CopyKind kind : {kit::CopyKind::kMemcpy, kit::CopyKind::kStreaming}) {
    for (const bool fp8 : {false, true}) {
      auto params = params_of(2, 8, 128, 2, fp8);
      const std::vector<std::int32_t> idx{0, 5, 4, 1, 7, 6};
      kit::CopyCeiling by_rank(params, 3);
      by_rank.warm(0);
      EXPECT_EQ(by_rank.copy_dispatch(0, plan_of(idx, false), {0, 0}, kind),
                5 * kit::dispatch_row_bytes(params));
      EXPECT_EQ(by_rank.copy_combine(0, plan_of(idx, false), {0, 0}, kind), 5 * kit::combine_row_bytes(128));
      params.layout = kernels::reference::Layout::kPacked;
      kit::CopyCeiling by_expert(params, 3);
      by_expert.warm(0);
      const std::vector<std::uint32_t> bases(8, 0);
      EXPECT_EQ(by_expert.copy_dispatch(0, plan_of(idx, true), bases, kind),
                6 * kit::dispatch_row_bytes(params));
      EXPECT_EQ(by_expert.copy_combine(0, plan_of(idx, true), bases, kind), 6 * kit::combine_row_bytes(128));
    }
  }
}

// ---- comparison: it must see every kind of difference

class Comparison : public testing::TestWithParam<bool> {
 protected:
  static constexpr std::uint32_t kTokens = 6;

  Comparison() : params_(params_of(2, 8, 128, 3, GetParam())) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      std::vector<std::uint16_t> x(std::size_t{kTokens} * 128);
      kit::fill_bf16(rank, x.data(), x.size());
      std::vector<std::int32_t> idx;
      for (std::uint32_t i = 0; i < kTokens * 3; ++i)
        idx.push_back(static_cast<std::int32_t>((i * 5 + rank) % 8));
      const std::vector<float> weights(std::size_t{kTokens} * 3, 0.25f);
      inputs_.push_back(kit::make_input(params_, {kTokens, x.data(), idx.data(), weights.data()}));
    }
    expected_ = kernels::reference::dispatch_to(params_, inputs_, 1);
    const std::size_t rows = std::size_t{2} * kTokens;
    recv_x_.resize(rows * 128 * 2);
    scales_.resize(rows);
    idx_.resize(rows * 3);
    weights_.resize(rows * 3);
    src_.resize(rows * 2);
    offsets_.resize(3);
    counts_.resize(4);
    buffers_.recv_x = recv_x_.data();
    buffers_.recv_scales = scales_.data();
    buffers_.recv_topk_idx = idx_.data();
    buffers_.recv_topk_weights = weights_.data();
    buffers_.recv_src = src_.data();
    buffers_.rank_offsets = offsets_.data();
    buffers_.expert_counts = counts_.data();
  }

  // What a correct engine would have delivered.
  void deliver() {
    std::copy(expected_.recv_x.begin(), expected_.recv_x.end(), recv_x_.begin());
    if (!expected_.recv_scales.empty())
      std::memcpy(scales_.data(), expected_.recv_scales.data(), expected_.recv_scales.size());
    std::copy(expected_.recv_topk_idx.begin(), expected_.recv_topk_idx.end(), idx_.begin());
    std::copy(expected_.recv_topk_weights.begin(), expected_.recv_topk_weights.end(), weights_.begin());
    std::copy(expected_.recv_src.begin(), expected_.recv_src.end(), src_.begin());
    std::copy(expected_.rank_offsets.begin(), expected_.rank_offsets.end(), offsets_.begin());
    std::copy(expected_.expert_counts.begin(), expected_.expert_counts.end(), counts_.begin());
  }
  std::string compare() const {
    return kit::compare_dispatch(params_, expected_, expected_.num_rows, buffers_);
  }

  kernels::reference::GroupParams params_;
  std::vector<kernels::reference::RankInput> inputs_;
  kernels::reference::RankReceived expected_;
  std::vector<std::uint8_t> recv_x_;
  std::vector<float> scales_, weights_;
  std::vector<std::int32_t> idx_, src_, offsets_, counts_;
  epd_buffers_t buffers_ = EPD_BUFFERS_INIT;
};

TEST_P(Comparison, AcceptsTheExpectedBitsAndNamesEachDifference) {
  ASSERT_GT(expected_.num_rows, 0u);
  deliver();
  EXPECT_EQ(compare(), "");
  EXPECT_THAT(kit::compare_dispatch(params_, expected_, expected_.num_rows + 1, buffers_),
              HasSubstr("received rows"));
  recv_x_[1] ^= 1;
  EXPECT_THAT(compare(), HasSubstr("recv_x[0]"));
  deliver();
  weights_[4] = -weights_[4];
  EXPECT_THAT(compare(), HasSubstr("recv_topk_weights[1][1]"));
  deliver();
  ++src_[3];
  EXPECT_THAT(compare(), HasSubstr("recv_src[1][1]"));
  deliver();
  ++counts_[3];
  EXPECT_THAT(compare(), HasSubstr("expert_counts[3]"));
  deliver();
  ++offsets_[2];
  EXPECT_THAT(compare(), HasSubstr("rank_offsets"));
  deliver();
  ++idx_[2];
  EXPECT_THAT(compare(), HasSubstr("recv_topk_idx[0][2]"));
  if (GetParam()) {
    deliver();
    scales_[0] *= 2;
    EXPECT_THAT(compare(), HasSubstr("recv_scales[0]"));
  }
}

TEST_P(Comparison, PoisonIsNeverTakenForAResult) {
  deliver();
  const kernels::RowRange all{0, 2 * kTokens};
  kit::poison_dispatch(params_, {&all, 1}, buffers_);
  EXPECT_NE(compare(), "");
}

INSTANTIATE_TEST_SUITE_P(Payloads, Comparison, testing::Bool(),
                         [](const auto& test) { return test.param ? "fp8" : "bf16"; });

TEST(TestData, Bf16StreamsAreFiniteAndRepeatable) {
  std::vector<std::uint16_t> first(4096), second(4096);
  kit::fill_bf16(11, first.data(), first.size());
  kit::fill_bf16(11, second.data(), second.size());
  EXPECT_EQ(first, second);
  for (const std::uint16_t bits : first) {
    const float magnitude = std::fabs(kernels::bf16_to_float(bits));
    ASSERT_GE(magnitude, 0.0078125f);
    ASSERT_LT(magnitude, 2.0f);
  }
}

// ---- what epbench runs

std::string refusal_of(const bench::RunPlan& plan) {
  try {
    bench::validate(plan);
  } catch (const kit::ToolError& error) {
    return error.what();
  }
  return "";
}

TEST(Plan, CommandsAndGraphsNeedKernelsThatStayAndTakeEverythingElse) {
  bench::RunPlan plan;
  plan.commands = plan.overlap = true;
  for (const bench::Backend backend : {bench::Backend::kHost, bench::Backend::kCuda}) {
    plan.backend = backend;
    plan.resident = backend == bench::Backend::kHost;
    EXPECT_THAT(refusal_of(plan), HasSubstr("with backend cuda, mode resident"));
  }
  plan.resident = true;
  for (const bool graph : {false, true}) {
    plan.graph = graph;
    EXPECT_EQ(refusal_of(plan), "");
    EXPECT_EQ(plan.config().commands, static_cast<std::uint32_t>(EPD_COMMANDS_BY_STREAM));
    EXPECT_EQ(plan.wait_name(), graph ? "memop graph" : "memop cmd");
  }
}

TEST(Suite, RunsWhatItCanOnBothBackendsInBothModes) {
  for (const bool small : {false, true}) {
    for (const bool resident : {false, true}) {
      bench::RunPlan plan;
      plan.gpus = 4;
      plan.resident = resident;
      for (const bench::Backend backend : {bench::Backend::kHost, bench::Backend::kCuda}) {
        plan.backend = backend;
        std::uint32_t by_commands = 0;
        for (const bench::SuiteRun& run : bench::suite_runs(plan, small)) {
          EXPECT_EQ(refusal_of(run.plan), "") << run.label;
          by_commands += run.plan.commands ? 1 : 0;
        }
        EXPECT_EQ(by_commands != 0, resident && backend == bench::Backend::kCuda);
      }
    }
  }
}

TEST(Overlap, IsTheShareOfTheOperationThatTheGemmHides) {
  bench::OverlapTimes times{
      .operation = 40, .gemm = 100, .serial = 140, .overlapped = 100, .gemm_beside = 104};
  EXPECT_DOUBLE_EQ(times.efficiency(), 1);
  EXPECT_DOUBLE_EQ(times.slowdown(), 1.04);
  times.overlapped = 130;
  EXPECT_DOUBLE_EQ(times.efficiency(), 0.25);
  times.overlapped = 150;  // worse than one after the other
  EXPECT_DOUBLE_EQ(times.efficiency(), -0.25);
  EXPECT_DOUBLE_EQ(bench::OverlapTimes{}.efficiency(), 0);
}

// ---- rank processes

TEST(Team, BarrierLetsNobodyPassEarly) {
  constexpr std::uint32_t kRounds = 200;
  kit::SharedArray<std::atomic<std::uint32_t>> arrived(kRounds);
  kit::Team team(3);
  team.run(
      [&](kit::TeamRank& self) {
        for (std::uint32_t round = 0; round < kRounds; ++round) {
          arrived[round].fetch_add(1);
          self.barrier();
          if (arrived[round].load() != 3) kit::fail("passed early");
        }
      },
      {});
  EXPECT_EQ(arrived[kRounds - 1].load(), 3u);
}

std::string failure_of(const kit::Team::Body& body) {
  kit::Team team(3);
  try {
    team.run(body, {});
  } catch (const kit::ToolError& error) {
    return error.what();
  }
  return "no failure";
}

TEST(Team, AFailedRankEndsTheRunWithItsMessage) {
  EXPECT_EQ(failure_of([](kit::TeamRank& self) {
              if (self.rank() == 1) kit::fail("out of luck");
              self.barrier();
            }),
            "rank 1: out of luck");
}

TEST(Team, AKilledRankEndsTheRun) {
  EXPECT_EQ(failure_of([](kit::TeamRank& self) {
              if (self.rank() == 2) ::kill(::getpid(), SIGKILL);
              self.barrier();
            }),
            "rank 2 was killed by signal 9");
}

// ---- text and model

TEST(Text, SplitsWordsIntoPiecesOfFiveLetters) {
  EXPECT_THAT(demo::split_into_pieces("The supervisor, 42!"),
              ElementsAre("the", "super", "#visor", ",", "4", "2", "!"));
  EXPECT_THAT(demo::split_into_pieces(" \n "), testing::IsEmpty());
}

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return dot / std::sqrt(aa * bb);
}

std::vector<float> embedding(const std::string& text, std::size_t place) {
  std::vector<float> out(1024);
  demo::embed(demo::split_into_pieces(text), place, 1024, out.data());
  return out;
}

TEST(Text, EmbeddingsRepeatHaveUnitSizeAndDependOnContextAndPosition) {
  const auto first = embedding("the expert answers", 1);
  EXPECT_EQ(first, embedding("the expert answers", 1));
  double squares = 0;
  for (const float value : first) squares += value * value;
  EXPECT_NEAR(squares / 1024, 1.0, 1e-3);
  EXPECT_NE(first, embedding("an expert answers", 1));
  EXPECT_GT(cosine(first, embedding("an expert", 1)), cosine(first, embedding("the token", 1)));
}

TEST(Model, MultipliesEveryShapeOfBlock) {
  kit::Random random(5);
  for (const std::size_t m : {1u, 3u, 4u, 6u}) {
    for (const std::size_t n : {1u, 4u, 5u}) {
      constexpr std::size_t kSize = 48;
      std::vector<float> a(m * kSize), b(n * kSize), out(m * n, -1.0f);
      for (float& value : a) value = random.normal();
      for (float& value : b) value = random.normal();
      demo::multiply_transposed({m, n, kSize}, a.data(), b.data(), out.data());
      for (std::size_t i = 0; i < m * n; ++i) {
        double sum = 0;
        for (std::size_t k = 0; k < kSize; ++k) {
          sum += static_cast<double>(a[i / n * kSize + k]) * b[i % n * kSize + k];
        }
        EXPECT_NEAR(out[i], sum, 1e-4) << m << "x" << n << " at " << i;
      }
    }
  }
}

demo::ModelShape small_model() {
  demo::ModelShape shape;
  shape.num_ranks = 2;
  shape.hidden = 128;
  shape.expert_rank = 4;
  shape.gate = {.num_experts = 16, .topk = 2, .num_groups = 4, .groups_kept = 2, .scale = 2.5f};
  return shape;
}

// One row for one expert at weight 1, the same at weight 2, and a row for nobody here.
TEST(Model, ExpertsWeighTheirRowsAndSkipWhatIsNotTheirs) {
  const demo::Experts experts(small_model(), 0, 1);
  std::vector<std::uint8_t> rows(384);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = kernels::float_to_e4m3(static_cast<float>(i % 128 % 7) - 3.0f);
  }
  const std::vector<float> scales(3, 0.5f);
  const std::vector<std::int32_t> idx{5, -1, -1, 5, -1, -1};
  const std::vector<float> weights{1, 0, 0, 2, 0, 0};
  std::vector<std::uint16_t> y(384, 0x7777);
  experts.run({3, rows.data(), scales.data(), idx.data(), weights.data()}, y.data());
  bool any = false;
  for (std::size_t i = 0; i < 128; ++i) {
    const float once = kernels::bf16_to_float(y[i]);
    any = any || once != 0.0f;
    EXPECT_FLOAT_EQ(kernels::bf16_to_float(y[128 + i]), 2 * once);
    EXPECT_EQ(y[256 + i], 0);
  }
  EXPECT_TRUE(any);
}

TEST(Model, GateRoutesEqualTokensAlikeAndTextUnevenly) {
  const demo::ModelShape shape = [] {
    demo::ModelShape made;
    made.hidden = 256;
    return made;
  }();
  const auto pieces = demo::split_into_pieces(
      "the token goes to the expert, the expert answers, the answer comes back, the layer ends, the next "
      "layer "
      "begins, the rows go to the ranks, the ranks add the rows");
  const auto count = static_cast<std::uint32_t>(pieces.size());
  std::vector<float> x(std::size_t{count} * 256);
  for (std::uint32_t t = 0; t < count; ++t) demo::embed(pieces, t, 256, &x[std::size_t{t} * 256]);
  std::vector<std::int32_t> idx(std::size_t{count} * 8), again(std::size_t{count} * 8);
  std::vector<float> weights(std::size_t{count} * 8);
  const demo::Gate gate(shape, 2);
  gate.select(x.data(), count, idx.data(), weights.data());
  gate.select(x.data(), count, again.data(), weights.data());
  EXPECT_EQ(idx, again);
  std::vector<int> counts(256, 0);
  for (const std::int32_t expert : idx) ++counts[static_cast<std::size_t>(expert)];
  const double mean = static_cast<double>(idx.size()) / 256;
  EXPECT_GT(*std::max_element(counts.begin(), counts.end()), 3 * mean);
}

}  // namespace
}  // namespace epd
