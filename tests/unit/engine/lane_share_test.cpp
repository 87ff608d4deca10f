// How lanes of a GPU share its SMs.
#include "device/launcher.h"

#include <gtest/gtest.h>
#include <random>
#include <vector>

namespace epd::device {
namespace {

TEST(LaneShare, OneLaneHasAll) {
  for (const std::uint32_t sms : {1u, 24u, 130u}) EXPECT_EQ(lane_share(sms, std::vector{0}, 0), sms);
}

TEST(LaneShare, EqualLanesHaveEqualShares) {
  const std::vector<std::int32_t> lanes(5, 3);
  for (std::size_t i = 0; i < lanes.size(); ++i) EXPECT_EQ(lane_share(24, lanes, i), 4u);
}

TEST(LaneShare, AStepOfPriorityIsTwiceTheWeight) {
  const std::vector<std::int32_t> lanes{1, 0};
  EXPECT_EQ(lane_share(32, lanes, 0), 21u);  // 1 + 30 * 2 / 3
  EXPECT_EQ(lane_share(32, lanes, 1), 11u);
}

TEST(LaneShare, AllFitBesideEachOtherAndNoneHasNothing) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::int32_t> lanes(1 + random() % 24);
    for (auto& priority : lanes) priority = static_cast<std::int32_t>(random() % 20) - 10;
    const auto sms = static_cast<std::uint32_t>(lanes.size() + random() % 110);
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      const std::uint32_t share = lane_share(sms, lanes, i);
      EXPECT_GE(share, 1u);
      sum += share;
    }
    EXPECT_LE(sum, sms);
  }
}

}  // namespace
}  // namespace epd::device
