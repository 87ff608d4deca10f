// What signals in a rank's exchange blocks say of its operations.
#include "device/signals.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

using abi::OpStage;
using device::SignalCopy;

constexpr std::uint32_t kRanks = 4;
constexpr std::uint32_t kOwn = 2;
constexpr std::uint64_t kTag = 70;

class SignalCopyTest : public ::testing::Test {
 protected:
  explicit SignalCopyTest(bool by_inboxes = false) : copy_(kRanks, 2, by_inboxes) {}

  // In block 1; block 0 is of an earlier operation, and complete.
  void SetUp() override {
    for (abi::SignalLine& line : copy_.lines()) line.tag = kTag - 1;
  }
  void ready(std::uint32_t rank) { copy_.lines()[2 * kRanks + rank].tag = kTag; }
  void arrived(std::uint32_t rank) { copy_.lines()[3 * kRanks + rank].tag = kTag; }
  void all_ready() {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) ready(rank);
  }
  void expect(OpStage stage, std::uint32_t awaited) {
    EXPECT_EQ(copy_.stage(op_), stage);
    EXPECT_EQ(copy_.awaited(op_, 0), awaited);
  }

  SignalCopy copy_;
  device::SignalledOperation op_{kOwn, kTag, 1, {}};
};

TEST_F(SignalCopyTest, StagesAndMissingRanksInTheirOrder) {
  expect(OpStage::kPlanning, SignalCopy::kNobody);
  ready(0);
  expect(OpStage::kPlanning, SignalCopy::kNobody);
  ready(kOwn);
  expect(OpStage::kWaitReady, 1);
  EXPECT_EQ(copy_.awaited(op_, 2), 3u);
  ready(3);
  EXPECT_EQ(copy_.awaited(op_, 2), SignalCopy::kNobody);
  ready(1);
  expect(OpStage::kMoving, SignalCopy::kNobody);
  arrived(1);
  expect(OpStage::kMoving, SignalCopy::kNobody);
  arrived(kOwn);
  expect(OpStage::kWaitArrived, 0);
  EXPECT_EQ(copy_.awaited(op_, 1), 3u);
  arrived(0);
  arrived(3);
  expect(OpStage::kMoving, SignalCopy::kNobody);
}

TEST_F(SignalCopyTest, NobodyWaitsForARankThatIsNotActive) {
  const std::uint8_t masked[kRanks] = {1, 0, 0, 1};
  op_.masked = masked;
  ready(kOwn);
  expect(OpStage::kWaitReady, 1);
  ready(1);
  expect(OpStage::kMoving, SignalCopy::kNobody);
  arrived(kOwn);
  expect(OpStage::kWaitArrived, 1);
  arrived(1);
  expect(OpStage::kMoving, SignalCopy::kNobody);
}

// A later operation in the block has been announced since.
TEST_F(SignalCopyTest, LaterTagsCount) {
  for (abi::SignalLine& line : copy_.lines()) line.tag = kTag + 2;
  expect(OpStage::kMoving, SignalCopy::kNobody);
}

class SignalCopyByInboxes : public SignalCopyTest {
 protected:
  SignalCopyByInboxes() : SignalCopyTest(true) {}
};

TEST_F(SignalCopyByInboxes, TheRanksOwnArrivalComesLast) {
  ready(kOwn);
  expect(OpStage::kWaitReady, 0);
  all_ready();
  expect(OpStage::kWaitArrived, 0);
  arrived(0);
  arrived(1);
  expect(OpStage::kWaitArrived, 3);
  arrived(3);
  expect(OpStage::kMoving, SignalCopy::kNobody);
  arrived(kOwn);
  expect(OpStage::kMoving, SignalCopy::kNobody);
}

}  // namespace
}  // namespace epd::test
