// Signals in a rank's exchange blocks show the state of its operations.
#include "device/signals.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

using abi::OpStage;
using device::SeenWaits;
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
  void ready(std::uint32_t rank) { copy_.lines()[3 * kRanks + rank].tag = kTag; }
  void arrived(std::uint32_t rank) { copy_.lines()[4 * kRanks + rank].tag = kTag; }
  void called(std::uint32_t rank) { copy_.lines()[5 * kRanks + rank].tag = kTag; }
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

// Ranks of the same device begin an operation when all of them have called it.
TEST_F(SignalCopyTest, ARankThatHasCalledWaitsForThoseOfItsDevice) {
  op_.together = 1u << 0 | 1u << 3;
  called(0);
  expect(OpStage::kPlanning, SignalCopy::kNobody);
  called(kOwn);
  expect(OpStage::kWaitReady, 3);
  EXPECT_EQ(copy_.awaited(op_, 4), SignalCopy::kNobody);
  called(3);
  expect(OpStage::kPlanning, SignalCopy::kNobody);
  ready(kOwn);
  expect(OpStage::kWaitReady, 1);
}

// Receiving is deferred: all ranks have to call.
TEST_F(SignalCopyTest, ARankThatWaitsForAllStandsUntilTheyHaveCalled) {
  called(kOwn);
  EXPECT_FALSE(copy_.stands(op_));
  copy_.lines()[5 * kRanks + kOwn].waiting = kTag;
  EXPECT_TRUE(copy_.stands(op_));
  expect(OpStage::kWaitReady, 0);
  called(0);
  called(1);
  expect(OpStage::kWaitReady, 3);
  called(3);
  EXPECT_FALSE(copy_.stands(op_));
  expect(OpStage::kPlanning, SignalCopy::kNobody);
}

TEST_F(SignalCopyTest, WhoHasCalledIsNotMissingWhileAnotherHasNot) {
  ready(kOwn);
  called(0);
  expect(OpStage::kWaitReady, 1);
  called(1);
  called(3);
  expect(OpStage::kWaitReady, 0);
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

class SeenWaitsTest : public SignalCopyTest {
 protected:
  void look(std::uint64_t at_ns) {
    copy_.begun_ns = at_ns;
    seen_.look(copy_, op_, {&counts_, waits_});
  }

  SeenWaits seen_;
  abi::RankCounts counts_{};
  abi::PeerWait waits_[kRanks]{};
};

TEST_F(SeenWaitsTest, CountFromLookToLookOfTheSameStage) {
  ready(kOwn);
  ready(3);
  look(1000);
  EXPECT_EQ(waits_[0].ready_ns, 0u) << "since when is not known";
  look(1050);
  look(1050);  // the same one
  EXPECT_EQ(waits_[0].ready_ns, 50u);
  EXPECT_EQ(waits_[1].ready_ns, 50u);
  EXPECT_EQ(waits_[3].ready_ns, 0u);
  ready(0);
  look(1150);
  EXPECT_EQ(waits_[0].ready_ns, 50u);
  EXPECT_EQ(waits_[1].ready_ns, 150u);
  ready(1);
  arrived(kOwn);
  arrived(0);
  look(1200);
  EXPECT_EQ(waits_[1].ready_ns, 150u);
  EXPECT_EQ(waits_[1].arrived_ns, 0u);
  look(1300);
  EXPECT_EQ(waits_[1].arrived_ns, 100u);
  EXPECT_EQ(waits_[3].arrived_ns, 100u);
  EXPECT_EQ(waits_[0].arrived_ns, 0u);
  EXPECT_EQ(waits_[kOwn].ready_ns + waits_[kOwn].arrived_ns, 0u);
}

TEST_F(SeenWaitsTest, AnotherOperationBeginsAnew) {
  ready(kOwn);
  look(1000);
  op_.tag = kTag - 1;
  look(1050);
  op_.tag = kTag;
  look(1100);
  for (const abi::PeerWait& wait : waits_) EXPECT_EQ(wait.ready_ns, 0u);
  look(1150);
  EXPECT_EQ(waits_[0].ready_ns, 50u);
}

}  // namespace
}  // namespace epd::test
