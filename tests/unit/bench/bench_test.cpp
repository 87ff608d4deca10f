// The runs of epbench, its rank processes, and its statistics.
#include "bench/operation_report.h"
#include "bench/plan.h"
#include "common/signal.h"
#include "kit/error.h"
#include "kit/report.h"
#include "kit/team.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>
#include <atomic>
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

// ---- what epbench runs

std::string refusal_of(const bench::RunPlan& plan) {
  try {
    bench::validate(plan);
  } catch (const kit::ToolError& error) {
    return error.what();
  }
  return "";
}

TEST(Plan, GraphsNeedGpusAndTakeEverythingElse) {
  bench::RunPlan plan;
  plan.graph = plan.overlap = true;
  EXPECT_THAT(refusal_of(plan), HasSubstr("graph is about GPUs; allowed: with backend cuda"));
  plan.backend = bench::Backend::kCuda;
  for (const bool graph : {false, true}) {
    plan.graph = graph;
    EXPECT_EQ(refusal_of(plan), "");
    EXPECT_EQ(plan.wait_name(), graph ? "memop graph" : "memop");
  }
}

// A benchmark of host devices printed the value, and measured without it.
TEST(Plan, LingeringOfHostDevicesWasAcceptedAndDidNothing) {
  bench::RunPlan plan;
  plan.linger_us = 50;
  EXPECT_THAT(refusal_of(plan), HasSubstr("linger-us is about GPUs; allowed: with backend cuda"));
  plan.backend = bench::Backend::kCuda;
  EXPECT_EQ(refusal_of(plan), "");
}

TEST(Plan, WithoutAStreamThereIsNothingToCaptureOrToOverlap) {
  bench::RunPlan plan;
  plan.in_stream = false;
  EXPECT_THAT(refusal_of(plan), HasSubstr("no-stream is about GPUs"));
  plan.backend = bench::Backend::kCuda;
  EXPECT_EQ(refusal_of(plan), "");
  EXPECT_EQ(plan.wait_name(), "no stream");
  plan.graph = true;
  EXPECT_THAT(refusal_of(plan), HasSubstr("without graph and overlap"));
  plan.graph = false;
  plan.overlap = true;
  EXPECT_THAT(refusal_of(plan), HasSubstr("without graph and overlap"));
}

TEST(Plan, WhatHasNoMeaningOrCanNotBeMadeIsRefusedByName) {
  bench::RunPlan plan;
  plan.zero_padding = true;
  EXPECT_THAT(refusal_of(plan),
              HasSubstr("zero-padding is about the rows that align experts; allowed: with layout packed"));
  plan.layout = EPD_LAYOUT_PACKED;
  EXPECT_EQ(refusal_of(plan), "");
  plan.experts = 4;
  EXPECT_THAT(refusal_of(plan), HasSubstr("topk is 8; allowed: 1..4"));
  plan.topk = 4;
  plan.routing = "/no/such/file";
  EXPECT_THAT(refusal_of(plan), HasSubstr("routing '/no/such/file' is not a file"));
}

TEST(Plan, OptionsThatMeanNothingForTheOperationWereTaken) {
  using bench::Operation;
  using bench::RunPlan;
  struct Case {
    Operation refused;
    Operation allowed;
    void (*change)(RunPlan&);
    const char* name;
  };
  const Case cases[] = {
      {Operation::kNoop, Operation::kCombine, [](RunPlan& p) { p.layout = EPD_LAYOUT_EXPERT; }, "layout"},
      {Operation::kNoop, Operation::kDispatch, [](RunPlan& p) { p.payload = EPD_PAYLOAD_FP8_CAST; },
       "payload"},
      {Operation::kNoop, Operation::kBoth, [](RunPlan& p) { p.max_recv_rows = 64; }, "max-recv-rows"},
      {Operation::kNoop, Operation::kBoth, [](RunPlan& p) { p.routing = "zipf"; }, "routing"},
      {Operation::kNoop, Operation::kBoth, [](RunPlan& p) { p.alignment = 16; }, "alignment"},
      {Operation::kCombine, Operation::kDispatch, [](RunPlan& p) { p.cached = true; }, "cached"},
      {Operation::kCombine, Operation::kBoth, [](RunPlan& p) { p.mark_unused = true; }, "mark-unused"},
      {Operation::kDispatch, Operation::kCombine, [](RunPlan& p) { p.weighted = true; }, "weighted"},
      {Operation::kDispatch, Operation::kBoth, [](RunPlan& p) { p.return_weights = true; }, "return-weights"},
      {Operation::kDispatch, Operation::kBoth, [](RunPlan& p) { p.biases = 1; }, "biases"},
      {Operation::kDispatch, Operation::kBoth, [](RunPlan& p) { p.sum_ranks = 2; }, "sum-ranks"},
  };
  for (const Case& c : cases) {
    RunPlan plan;
    c.change(plan);
    plan.operation = c.refused;
    EXPECT_THAT(refusal_of(plan), testing::MatchesRegex(std::string(c.name) + " .*; allowed: with .*"))
        << c.name;
    plan.operation = c.allowed;
    EXPECT_EQ(refusal_of(plan), "") << c.name;
  }
  RunPlan expert;
  expert.layout = EPD_LAYOUT_EXPERT;
  expert.alignment = 16;
  EXPECT_THAT(refusal_of(expert), HasSubstr("alignment is about "));
}

TEST(Suite, RunsWhatItCanOnBothBackends) {
  for (const bool small : {false, true}) {
    bench::RunPlan plan;
    plan.gpus = 4;
    for (const bench::Backend backend : {bench::Backend::kHost, bench::Backend::kCuda}) {
      plan.backend = backend;
      const bool gpus = backend == bench::Backend::kCuda;
      std::uint32_t graphs = 0;
      std::uint32_t without_a_stream = 0;
      for (const bench::SuiteRun& run : bench::suite_runs(plan, small)) {
        EXPECT_EQ(refusal_of(run.plan), "") << run.label;
        graphs += run.plan.graph ? 1 : 0;
        without_a_stream += run.plan.in_stream ? 0 : 1;
      }
      EXPECT_EQ(graphs != 0, gpus);
      EXPECT_EQ(without_a_stream != 0, gpus);
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
              if (self.rank() == 2) send_signal(::getpid(), SIGKILL);
              self.barrier();
            }),
            "rank 2 was killed by signal 9");
}

}  // namespace
}  // namespace epd
