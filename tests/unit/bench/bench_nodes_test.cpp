// Where ranks run, what must cross between nodes, and the figures of epbench nodes.
#include "bench/nodes_bench.h"
#include "kit/daemon.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "proto/far.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace epd {
namespace {

using testing::DoubleEq;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> places(std::uint32_t ranks, std::uint32_t nodes) {
  std::vector<std::string> all;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    const kit::RankPlace place = kit::place_of(rank, ranks, nodes);
    all.push_back(std::to_string(place.node) + "." + std::to_string(place.device));
  }
  return all;
}

TEST(Places, RanksFillTheNodesInOrderAndTheFirstHaveOneMore) {
  EXPECT_THAT(places(4, 1), ElementsAre("0.0", "0.1", "0.2", "0.3"));
  EXPECT_THAT(places(4, 2), ElementsAre("0.0", "0.1", "1.0", "1.1"));
  EXPECT_THAT(places(5, 3), ElementsAre("0.0", "0.1", "1.0", "1.1", "2.0"));
  EXPECT_THAT(places(3, 3), ElementsAre("0.0", "1.0", "2.0"));
}

TEST(Rate, IsANumberAndAUnit) {
  EXPECT_EQ(kit::bits_per_second(""), 0);
  EXPECT_EQ(kit::bits_per_second("4gbit"), 4e9);
  EXPECT_EQ(kit::bits_per_second("500mbit"), 5e8);
  EXPECT_EQ(kit::bits_per_second("64kbit"), 64e3);
  for (const char* bad : {"4", "gbit", "4gb", "4 gbit", "-4gbit", "0gbit", "4gbit;reboot"}) {
    try {
      kit::bits_per_second(bad);
      ADD_FAILURE() << bad;
    } catch (const kit::ToolError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rate is '" + std::string(bad) + "'; allowed: "));
    }
  }
}

// Four ranks on two nodes, two experts each: experts 0..3 are on node 0, 4..7 on node 1.
bench::RunPlan four_ranks_on_two_nodes() {
  bench::RunPlan plan;
  plan.ranks = 4;
  plan.nodes = 2;
  plan.experts = 8;
  plan.topk = 3;
  plan.hidden = 256;
  plan.sum_ranks = 2;
  return plan;
}

constexpr std::int32_t kChoices[] = {
    0, 1,  3,   // all near node 0
    4, 5,  6,   // two ranks of node 1
    0, 7,  -1,  // one of each
    4, -1, 2,
};

TEST(FarBytes, ATokenCrossesOnceForEachNode) {
  const bench::RunPlan plan = four_ranks_on_two_nodes();
  const bench::FarBytes from_0 = bench::far_bytes(plan, 1, kChoices);
  EXPECT_EQ(from_0.pairs, 3u);
  EXPECT_EQ(from_0.rows, 3 * abi::far_row_bytes(512, 3));
  EXPECT_EQ(from_0.asks, 3 * abi::far_ask_bytes(3));
  EXPECT_EQ(from_0.sums, 3 * abi::far_sum_bytes(512, 0));
  EXPECT_EQ(from_0.announcements, sizeof(abi::FarHeader) + sizeof(abi::FarAnnouncement) + 2 * 4);
  EXPECT_EQ(bench::far_bytes(plan, 2, kChoices).pairs, 3u);  // the first, the third and the fourth
}

TEST(FarBytes, SumsCrossForEachDomainOnlyWhereANodeHasAllOfIt) {
  bench::RunPlan plan = four_ranks_on_two_nodes();
  for (const auto& [sum_ranks, sums] :
       {std::pair{1u, 4u}, std::pair{2u, 3u}, std::pair{4u, 4u}, std::pair{0u, 4u}}) {
    plan.sum_ranks = sum_ranks;
    EXPECT_EQ(bench::far_bytes(plan, 0, kChoices).sums, sums * abi::far_sum_bytes(512, 0)) << sum_ranks;
  }
}

TEST(FarBytes, ExpertsAreAnnouncedWhereRowsLieByExpertAndWeightsComeBackIfAsked) {
  bench::RunPlan plan = four_ranks_on_two_nodes();
  plan.layout = EPD_LAYOUT_PACKED;
  plan.return_weights = true;
  const bench::FarBytes bytes = bench::far_bytes(plan, 0, kChoices);
  EXPECT_EQ(bytes.announcements, sizeof(abi::FarHeader) + sizeof(abi::FarAnnouncement) + 4 * 4);
  EXPECT_EQ(bytes.sums, 3 * abi::far_sum_bytes(512, 3));
}

TEST(FarBytes, NothingCrossesOnOneNode) {
  bench::RunPlan plan = four_ranks_on_two_nodes();
  plan.nodes = 1;
  const bench::FarBytes bytes = bench::far_bytes(plan, 0, kChoices);
  EXPECT_EQ(bytes.rows + bytes.sums + bytes.asks + bytes.announcements, 0u);
}

// Two iterations in each of two pairs of two ranks on two nodes.
struct Measured {
  Measured() : samples(4, 2, 4, 2) {
    plan.ranks_per_node = 1;
    plan.pairs = 2;
    plan.pair_iterations = 2;
    plan.rate = "8mbit";
    plan.run.nodes = 2;
    run = plan.run_of(4096);
    const double times[] = {1000, 900, 800, 1000, 2000, 1, 1, 2000};
    for (std::size_t i = 0; i < 8; ++i) {
      samples.dispatch.time_us[i] = times[i];
      samples.dispatch.record_bytes[i] = i % 2 == 0 ? 1 << 20 : 1 << 19;
      samples.dispatch.request_bytes[i] = 100;
      samples.dispatch.needed_bytes[i] = samples.dispatch.record_bytes[i] + 100;
    }
    for (std::size_t i = 0; i < 4; ++i) samples.dispatch.link_bytes[i] = 1650000;
  }
  bench::NodesPlan plan;
  bench::RunPlan run;
  bench::Samples samples;
};

TEST(NodesReport, SharesAreOfTheBusiestNodeInEachPair) {
  Measured m;
  m.samples.raw_stream_mibps[0] = 1250;
  m.samples.raw_stream_mibps[1] = 1000;
  const bench::Json report = bench::make_nodes_report("dispatch", m.plan, m.run, m.samples, "");
  EXPECT_EQ(report.at("needed_bytes"), 4u * ((3u << 19) + 200));
  EXPECT_DOUBLE_EQ(report.at("link_bytes_over_needed"),
                   4 * 1650000.0 / report.at("needed_bytes").get<double>());
  EXPECT_THAT(report.at("shares").get<std::vector<double>>(), ElementsAre(DoubleEq(0.8), DoubleEq(0.5)));
  EXPECT_EQ(report.at("asked_bytes"), 0u);
  EXPECT_EQ(report.at("bound"), "link");
  EXPECT_DOUBLE_EQ(report.at("share_of_raw"), 0.65);
  EXPECT_FALSE(report.contains("added_us"));
}

TEST(NodesReport, TimeIsAddedToTheRawRoundTripOfThePair) {
  Measured m;
  m.samples.raw_dispatch_us[0] = 700;
  m.samples.raw_dispatch_us[1] = 1900;
  const bench::Json report = bench::make_nodes_report("dispatch", m.plan, m.run, m.samples, "");
  EXPECT_DOUBLE_EQ(report.at("added_us"), 200);  // of 300 and 100
  EXPECT_FALSE(report.contains("share_of_raw"));
  EXPECT_THAT(bench::nodes_text({report}), HasSubstr("+200 us"));
  EXPECT_THAT(bench::bound_of(1000, 0, 2, 2), HasSubstr("6 threads that poll, 2 cores"));
  EXPECT_EQ(bench::bound_of(1000, 0, 2, 6), "hand-offs");
}

TEST(NodesReport, AWrongResultIsNamed) {
  Measured m;
  m.samples.dispatch.verdicts[1].checks = 3;
  m.samples.dispatch.verdicts[1].failures = 1;
  std::snprintf(m.samples.dispatch.verdicts[1].first, 16, "row 7");
  const bench::Json report = bench::make_nodes_report("dispatch", m.plan, m.run, m.samples, "");
  EXPECT_FALSE(kit::all_correct({report}));
  EXPECT_EQ(report.at("first_difference"), "row 7");
  EXPECT_THAT(bench::nodes_text({report}),
              testing::AllOf(HasSubstr("WRONG"), HasSubstr("first difference: row 7")));
}

TEST(NodesPlan, TellsWhatIsAllowed) {
  for (const auto& [change, text] :
       {std::pair<void (*)(bench::NodesPlan&), const char*>{[](bench::NodesPlan& p) { p.run.nodes = 65; },
                                                            "nodes is 65; allowed: 1..64"},
        {[](bench::NodesPlan& p) { p.ranks_per_node = 0; }, "ranks-per-node is 0; allowed: 1..64"},
        {[](bench::NodesPlan& p) { p.pairs = 0; }, "pairs is 0; allowed: 1..1000"},
        {[](bench::NodesPlan& p) { p.rate = "fast"; }, "rate is 'fast'"},
        {[](bench::NodesPlan& p) { p.run.hidden = 100; }, "hidden is 100"}}) {
    bench::NodesPlan plan;
    plan.run.nodes = 2;
    change(plan);
    try {
      plan.validate();
      ADD_FAILURE() << text;
    } catch (const kit::ToolError& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  }
}

TEST(Command, ItsEndIsToldWithWhatItSaid) {
  EXPECT_EQ(kit::run_command({"sh", "-c", "echo out; echo err >&2; exit 3"}).status, 3);
  EXPECT_EQ(kit::must_run({"sh", "-c", "echo $NAME"}, {.environment = {"NAME=value"}}), "value\n");
  EXPECT_EQ(kit::run_command({"no-such-program-of-epd"}).status, 127);
  const kit::CommandResult killed = kit::run_command({"sleep", "60"}, {.seconds = 0.2});
  EXPECT_EQ(killed.status, 128 + 9);
  EXPECT_THAT(killed.err, HasSubstr("killed after"));
  try {
    kit::must_run({"sh", "-c", "echo why >&2; exit 1"});
    ADD_FAILURE();
  } catch (const kit::ToolError& error) {
    EXPECT_THAT(error.what(), HasSubstr("ended with status 1: why"));
  }
}

}  // namespace
}  // namespace epd
