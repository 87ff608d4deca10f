// The counts of an engine: histogram buckets, and the rows of sessions and memberships in its page.
#include "proto/statistics.h"

#include "engine_harness.h"
#include "kernels/numbers.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

namespace epd::test {
namespace {

using abi::Op;

TEST(Histogram, BucketsAreAscendingWithoutHolesAndAQuarterWide) {
  for (std::size_t b = 0; b + 1 < abi::kHistogramBuckets; ++b) {
    const std::uint64_t low = abi::histogram_floor(b);
    const std::uint64_t next = abi::histogram_floor(b + 1);
    ASSERT_LT(low, next);
    ASSERT_EQ(abi::histogram_bucket(static_cast<std::uint32_t>(low)), b);
    ASSERT_EQ(abi::histogram_bucket(static_cast<std::uint32_t>(next - 1)), b);
    ASSERT_LE((next - low) * 4, std::max<std::uint64_t>(low, 4)) << b;
  }
  EXPECT_EQ(abi::histogram_bucket(~std::uint32_t{0}), abi::kHistogramBuckets - 1);
}

TEST(Histogram, PercentilesLieInTheBucketOfTheValue) {
  std::array<std::uint64_t, abi::kHistogramBuckets> counts{};
  EXPECT_EQ(abi::histogram_percentile(counts, 500), 0u);
  for (std::uint32_t us = 1; us <= 1000; ++us) ++counts[abi::histogram_bucket(us)];
  EXPECT_NEAR(static_cast<double>(abi::histogram_percentile(counts, 500)), 500, 10);
  EXPECT_NEAR(static_cast<double>(abi::histogram_percentile(counts, 990)), 990, 35);
  counts.fill(0);
  counts[abi::kHistogramBuckets - 1] = 1;
  EXPECT_GE(abi::histogram_percentile(counts, 990), abi::histogram_floor(abi::kHistogramBuckets - 1));
}

constexpr abi::GroupShape kShape = [] {
  abi::GroupShape shape{};
  shape.num_ranks = 1;
  shape.num_experts = 2;
  shape.max_tokens = 4;
  shape.hidden = 128;
  shape.topk = 1;
  shape.depth = 2;
  shape.num_more_formats = 1;
  shape.more_formats[0].payload = abi::Payload::kFp8Cast;
  return shape;
}();

class EngineStatistics : public ::testing::Test {
 protected:
  EngineStatistics() : engine_(0), session_(41), group_(7, kShape), ringer_(group_.host_ringer(0, session_)) {
    engine_.start();
    session_.add_to(engine_);
    group_.add_to({&engine_}, {&session_});
    map_ = Mapping::map(engine_.page().get(), sizeof(abi::EnginePage), Access::kReadWrite).value();
  }
  const abi::EnginePage& page() const { return *map_.as<abi::EnginePage>(); }
  const abi::StatisticsRow* session_row(std::uint64_t id) const {
    for (const abi::StatisticsRow& row : page().sessions.rows)
      if (row.key != 0 && row.session_id == id) return &row;
    return nullptr;
  }
  const abi::StatisticsRow* member_row(std::uint64_t group) const {
    for (const abi::StatisticsRow& row : page().members.rows)
      if (row.key != 0 && row.group_id == group) return &row;
    return nullptr;
  }
  // Until it is counted, too, which is a moment later.
  bool run(Op op, std::uint32_t tokens = 0, std::uint32_t flags = 0) {
    abi::Call call = call_on(op, 0);
    call.flags = flags;
    const std::uint64_t before = page().ops_completed;
    return ringer_.ends_well(ringer_.ring(call, tokens, 1)) &&
           comes([&] { return page().ops_completed == before + 1; });
  }
  // To which expert each token goes.
  void fill() {
    for (std::uint32_t t = 0; t < 4; ++t) group_.region<std::int32_t>(0, 0, abi::Region::kTopkIdx)[t] = 1;
  }
  static std::uint64_t total(const abi::Histogram& histogram) {
    std::uint64_t sum = 0;
    for (const auto& bucket : histogram.buckets) sum += bucket;
    return sum;
  }

  EngineThread engine_;
  RawSession session_;
  RawGroup group_;
  Ringer ringer_;
  Mapping map_;
};

TEST_F(EngineStatistics, CountOperationsBytesAndTimesOfSessionAndMembership) {
  fill();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(run(Op::kNoop));
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(run(Op::kDispatch, 4));
  ASSERT_TRUE(run(Op::kCombine));
  for (const abi::StatisticsRow* row : {session_row(41), member_row(7)}) {
    ASSERT_NE(row, nullptr);
    EXPECT_EQ(row->operations[static_cast<std::size_t>(Op::kNoop)], 3u);
    EXPECT_EQ(row->operations[static_cast<std::size_t>(Op::kDispatch)], 2u);
    EXPECT_TRUE(comes([&] { return row->ended[0] == 6u; }));
    EXPECT_EQ(row->bytes_dispatched, 2u * 4 * 128 * 2);
    EXPECT_EQ(row->bytes_combined, 4u * 128 * 2);
    EXPECT_EQ(total(row->ran), 3u) << "not noops";
  }
}

TEST_F(EngineStatistics, BytesAreThoseOfTheDispatchsRowFormat) {
  fill();
  ASSERT_TRUE(run(Op::kDispatch, 4, 1u << abi::kFormatShift));
  ASSERT_NE(member_row(7), nullptr);
  EXPECT_EQ(member_row(7)->bytes_dispatched, 4u * (128 + 4)) << "e4m3 with a scale";
}

TEST_F(EngineStatistics, CountRefusalsByStatus) {
  ASSERT_TRUE(run(Op::kNoop));
  ringer_.ring(dispatch_on(9), 0, 1);
  ASSERT_TRUE(engine_.expect(abi::LinkType::kSessionFailed));
  EXPECT_EQ(session_row(41)->refused[static_cast<std::size_t>(StatusCode::kInvalidArgument)], 1u);
}

TEST_F(EngineStatistics, RowsAreGivenBackAndSharedWhenThereAreTooMany) {
  std::vector<std::unique_ptr<RawSession>> crowd;
  for (std::uint64_t id = 1000; id < 1000 + abi::kSessionRows + 4; ++id) {
    crowd.push_back(std::make_unique<RawSession>(id));
    crowd.back()->add_to(engine_);
  }
  engine_.send(abi::LinkType::kRemoveSession, abi::SessionRef{1000});
  ASSERT_TRUE(engine_.expect(abi::LinkType::kSessionRemoved));  // the link is in order: all were added
  EXPECT_EQ(page().sessions.unlisted, 5u) << "one row was taken before";
  EXPECT_EQ(page().sessions.rows[abi::kSessionRows].key, ~std::uint64_t{0});
  EXPECT_EQ(session_row(1000), nullptr);
  RawSession late(5000);
  late.add_to(engine_);
  engine_.send(abi::LinkType::kRemoveSession, abi::SessionRef{1001});
  ASSERT_TRUE(engine_.expect(abi::LinkType::kSessionRemoved));
  EXPECT_NE(session_row(5000), nullptr) << "a row that was given back is used again";
}

TEST_F(EngineStatistics, AnEngineThatStartsAgainBeginsAnew) {
  ASSERT_TRUE(run(Op::kNoop));
  engine_.stop();
  EXPECT_EQ(page().sessions.rows[0].key, 0u) << "a row goes with its session";
  engine_.start();
  EXPECT_EQ(page().ops_completed, 0u);
  EXPECT_EQ(session_row(41), nullptr);
}

TEST_F(EngineStatistics, GroupSettingsOfAKnownGroupAreTaken) {
  engine_.send(abi::LinkType::kGroupSettings, abi::GroupSettings{7, 1, abi::kMaxPriority, 0, 0});
  EXPECT_TRUE(run(Op::kDispatch, 4));
  EXPECT_EQ(engine_.stop(), 0) << "the message was understood";
}

}  // namespace
}  // namespace epd::test
