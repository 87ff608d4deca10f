// Series of single ranks: bounded, and never falling.
#include "families.h"

#include <gtest/gtest.h>
#include <prometheus/metric_family.h>
#include <map>
#include <string>
#include "epd/v1/control.pb.h"

namespace epd::test {
namespace {

using metrics::Families;
using metrics::RankSeries;

class RankSeriesTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kSecond = 1'000'000;  // us

  void make_group(std::uint32_t ranks, std::uint64_t id = 4) {
    v1::GroupWaits& group = *waits_.add_groups();
    group.set_group_id(id);
    group.set_name("g");
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      v1::RankWaits& out = *group.add_ranks();
      out.set_rank(rank);
      out.set_device("host:0");
    }
  }
  v1::RankWaits& rank(int number) { return *waits_.mutable_groups(0)->mutable_ranks(number); }
  void waited_for(int number, std::uint64_t us) {
    rank(number).set_waited_for_ready_us(rank(number).waited_for_ready_us() + us);
  }

  // One scrape: each series with its labels.
  std::map<std::string, double> scrape(std::size_t max_groups = 8) {
    clock_.advance_ms(1000);
    Families out;
    series_.tell(out, waits_, max_groups);
    std::map<std::string, double> all;
    for (const prometheus::MetricFamily& family : std::move(out).take()) {
      for (const prometheus::ClientMetric& metric : family.metric) {
        std::string name = family.name;
        for (const auto& label : metric.label) {
          if (label.name != "group" && label.name != "group_id") name += " " + label.value;
        }
        all[name] = family.type == prometheus::MetricType::Gauge ? metric.gauge.value : metric.counter.value;
      }
    }
    return all;
  }
  static double waited(const std::map<std::string, double>& all, const std::string& rank) {
    const auto found = all.find("epd_rank_waited_for_seconds_total " + rank + " ready");
    return found == all.end() ? -1 : found->second;
  }

  ManualClock clock_;
  RankSeries series_{3, clock_};
  v1::GetWaitsResponse waits_;
};

TEST_F(RankSeriesTest, OfASmallGroupAllRanksAndPairsAreTold) {
  make_group(3);
  waited_for(1, 2 * kSecond);
  rank(1).set_waited_for_arrived_us(kSecond / 2);
  rank(1).set_last_arrivals(7);
  rank(2).set_rows(30);
  rank(0).set_rows(15);
  v1::PairWait& pair = *waits_.mutable_groups(0)->add_pairs();
  pair.set_rank(0);
  pair.set_peer(1);
  pair.set_ready_us(kSecond);
  pair.set_arrived_us(kSecond / 2);
  const auto all = scrape();
  EXPECT_EQ(waited(all, "1"), 2);
  EXPECT_EQ(waited(all, "0"), 0);
  EXPECT_EQ(all.at("epd_rank_waited_for_seconds_total 1 arrived"), 0.5);
  EXPECT_EQ(all.at("epd_rank_last_arrivals_total 1"), 7);
  EXPECT_EQ(all.at("epd_rank_rows_total 2"), 30);
  EXPECT_EQ(all.at("epd_rank_wait_seconds_total 0 1"), 1.5);
  EXPECT_EQ(all.at("epd_rank_wait_seconds_total 2 1"), 0) << "from the start";
  EXPECT_EQ(all.count("epd_rank_wait_seconds_total 1 1"), 0u);
  EXPECT_EQ(all.at("epd_group_rows_ratio"), 2) << "30 of 15 in the mean";
  EXPECT_EQ(waited(all, "other"), -1);
}

TEST_F(RankSeriesTest, OfALargeGroupThoseAreToldThatAreWaitedForMost) {
  make_group(100);
  for (int number = 0; number < 100; ++number) waited_for(number, 10 + static_cast<std::uint64_t>(number));
  waited_for(70, 5 * kSecond);
  const auto all = scrape();
  EXPECT_NEAR(waited(all, "70"), 5, 1e-3);
  EXPECT_GE(waited(all, "99"), 0);
  EXPECT_GE(waited(all, "98"), 0);
  EXPECT_EQ(waited(all, "97"), -1);
  EXPECT_GT(waited(all, "other"), 0);
  std::size_t series = 0;
  for (const auto& [name, value] : all) series += name.find("epd_rank_rows_total") == 0 ? 1 : 0;
  EXPECT_EQ(series, 4u);
  for (const auto& [name, value] : all) EXPECT_NE(name.find("epd_rank_wait_seconds_total"), 0u) << name;
}

// Ranks come to be told and cease to be; what is told twice, or falls, would be a burst to Prometheus.
TEST_F(RankSeriesTest, NoCounterFallsAndNothingIsToldTwice) {
  make_group(20);
  std::map<std::string, double> last;
  double told = 0;
  std::uint64_t seed = 1;
  for (int round = 0; round < 500; ++round) {
    for (int number = 0; number < 20; ++number) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      const int slow = round / 50 % 20;  // another one each 50 rounds
      waited_for(number, (seed >> 40) % 1000 + (number == slow ? 20'000 : 0));
    }
    std::map<std::string, double> now = scrape();
    for (auto& [name, value] : now) {
      const auto before = last.find(name);
      if (name.find("_total") == std::string::npos) continue;
      if (before != last.end()) {
        ASSERT_GE(value, before->second) << name << " in round " << round;
      }
    }
    for (auto& [name, value] : now) last[name] = value;
    if (round % 50 == 49) {
      EXPECT_GT(waited(now, std::to_string(round / 50 % 20)), 0.1) << "the slow one is told";
    }
  }
  for (const auto& [name, value] : last) {
    if (name.find("waited_for") != std::string::npos) told += value;
  }
  double counted = 0;
  for (int number = 0; number < 20; ++number)
    counted += static_cast<double>(rank(number).waited_for_ready_us());
  EXPECT_NEAR(told, counted / kSecond, 1e-6);
}

TEST_F(RankSeriesTest, ARankThatHasComeBackCountsOn) {
  make_group(2);
  rank(1).set_rows(100);
  EXPECT_EQ(scrape().at("epd_rank_rows_total 1"), 100);
  rank(1).set_rows(5);
  EXPECT_EQ(scrape().at("epd_rank_rows_total 1"), 105);
}

TEST_F(RankSeriesTest, TheRatioIsOfTheLastMinutesAndOfRanksHere) {
  make_group(3);
  rank(2).clear_device();
  rank(0).set_rows(1000);
  EXPECT_EQ(scrape().at("epd_group_rows_ratio"), 2) << "of two ranks one has all";
  clock_.advance_ms(3'600'000);
  rank(0).set_rows(1000 + 500);
  rank(1).set_rows(500);
  EXPECT_NEAR(scrape().at("epd_group_rows_ratio"), 1, 0.01);
}

TEST_F(RankSeriesTest, GroupsBeyondTheLimitHaveNone) {
  for (std::uint64_t id = 1; id <= 3; ++id) make_group(2, id);
  Families out;
  series_.tell(out, waits_, 2);
  for (const prometheus::MetricFamily& family : std::move(out).take()) {
    for (const prometheus::ClientMetric& metric : family.metric) EXPECT_NE(metric.label.at(1).value, "3");
  }
}

}  // namespace
}  // namespace epd::test
