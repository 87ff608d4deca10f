// An operation of a host counts its waits by the times at which the other ranks have given their signals,
// however late it looks.
#include "host_operation.h"
#include "host_signals.h"

#include <gtest/gtest.h>
#include <array>
#include <memory>

namespace epd::test {
namespace {

using abi::OpStage;
using device::give_signal;
using device::HostOperation;
using device::HostPlans;
using device::OperationPeers;

constexpr std::uint32_t kRanks = 3;
constexpr std::uint64_t kTag = abi::op_tag(1, 7);

// Rank 0 is the operation's; the test is the others. No rank has tokens.
class HostWaitsTest : public ::testing::Test, private OperationPeers {
 protected:
  // Other ranks write this into a rank's block.
  struct Block {
    std::array<abi::SignalLine, kRanks> ready{};
    std::array<abi::SignalLine, kRanks> arrived{};
    std::array<abi::OpAnnouncement, kRanks> announcement{};
    std::array<std::uint32_t, std::size_t{kRanks} * kRanks> rank_counts{};
    std::array<std::uint32_t, std::size_t{kRanks} * kRanks> expert_counts{};
  };

  kernels::Peer peer(std::uint32_t rank) const override {
    kernels::Peer peer;
    Block& block = blocks_[rank];
    peer.ready = block.ready.data();
    peer.arrived = block.arrived.data();
    peer.announcement = block.announcement.data();
    peer.rank_counts = block.rank_counts.data();
    peer.expert_counts = block.expert_counts.data();
    return peer;
  }
  std::span<const std::uint8_t> masked() const override { return masked_; }
  void ring() const override {}

  void begin() {
    kernels::Operation op;
    op.shape.num_ranks = kRanks;
    op.shape.num_experts = kRanks;
    op.shape.topk = 1;
    op.shape.hidden = op.shape.format.hidden = 128;
    op.shape.format.x_bytes = op.shape.format.row_bytes = 256;
    op.tag = op.announcement.tag = kTag;
    op.routing = {nullptr, nullptr, placement_.data(), nullptr, nullptr, 8, 1};
    operation_ = std::make_unique<HostOperation>(
        kernels::Kind::kDispatch, op,
        HostOperation::Needs{*this, plans_, 0, {}, 0, nullptr, {&counts_, waits_.data()}});
    run();
  }
  // As far as it comes by itself.
  void run() {
    for (int step = 0; step < 1000 && operation_->advance(); ++step) {
    }
  }
  // When the operation has announced itself, and when it was done with the others.
  std::uint64_t announced_ns() const { return blocks_[1].ready[0].at_ns; }
  std::uint64_t done_ns() const { return blocks_[1].arrived[0].at_ns; }
  void ready(std::uint32_t rank, std::uint64_t at_ns) {
    blocks_[0].announcement[rank].tag = kTag;
    give_signal(blocks_[0].ready[rank], kTag, at_ns);
  }
  void arrived(std::uint32_t rank, std::uint64_t at_ns) {
    give_signal(blocks_[0].arrived[rank], kTag, at_ns);
  }

  mutable std::array<Block, kRanks> blocks_{};
  std::vector<std::uint8_t> masked_;
  std::array<std::int32_t, 64> placement_{};
  HostPlans plans_{2};
  abi::RankCounts counts_{};
  std::array<abi::PeerWait, kRanks> waits_{};
  std::unique_ptr<HostOperation> operation_;
};

TEST_F(HostWaitsTest, CountUntilEachSignalWasGiven) {
  begin();
  ASSERT_EQ(operation_->stage(), OpStage::kWaitReady);
  ready(2, announced_ns() + 70);  // behind rank 1, which is still missing
  run();
  EXPECT_EQ(waits_[2].ready_ns, 0u) << "not looked at yet";
  ready(1, announced_ns() + 500);
  run();
  ASSERT_EQ(operation_->stage(), OpStage::kWaitArrived);
  EXPECT_EQ(waits_[1].ready_ns, 500u);
  EXPECT_EQ(waits_[2].ready_ns, 70u) << "its own time, not that of rank 1";
  arrived(1, done_ns() + 3);
  run();
  arrived(2, done_ns() + 9);
  run();
  ASSERT_TRUE(operation_->ended());
  EXPECT_EQ(operation_->result().error, kernels::OpError::kNone);
  EXPECT_EQ(waits_[1].arrived_ns, 3u);
  EXPECT_EQ(waits_[2].arrived_ns, 9u);
  EXPECT_EQ(waits_[0].ready_ns + waits_[0].arrived_ns, 0u) << "nobody waits for himself";
  EXPECT_EQ(counts_.operations, 1u);
  EXPECT_EQ(counts_.last_arrivals, 0u);
}

TEST_F(HostWaitsTest, TheLastOneWaitsForNobody) {
  begin();
  for (const std::uint32_t rank : {1u, 2u}) ready(rank, announced_ns() - 1);
  run();
  for (const std::uint32_t rank : {1u, 2u}) arrived(rank, done_ns() - 1);
  run();
  ASSERT_TRUE(operation_->ended());
  for (const abi::PeerWait& wait : waits_) EXPECT_EQ(wait.ready_ns + wait.arrived_ns, 0u);
  EXPECT_EQ(counts_.operations, 1u);
  EXPECT_EQ(counts_.last_arrivals, 1u);
}

TEST_F(HostWaitsTest, AnOperationThatIsGivenUpHasWaitedUntilThen) {
  begin();
  ready(2, announced_ns() + 70);
  const std::uint64_t before_ns = MonotonicClock().now_ns();
  operation_->abort();
  EXPECT_GE(waits_[1].ready_ns, before_ns - announced_ns());
  EXPECT_LE(waits_[1].ready_ns, MonotonicClock().now_ns() - announced_ns());
  EXPECT_EQ(waits_[2].ready_ns, 70u);
  EXPECT_EQ(counts_.operations, 0u) << "not all have announced it";
}

TEST_F(HostWaitsTest, NobodyWaitsForARankThatTakesNoPart) {
  masked_ = {0, 0, 1};
  begin();
  ready(1, announced_ns() + 5);
  run();
  arrived(1, done_ns() + 6);
  run();
  ASSERT_TRUE(operation_->ended());
  EXPECT_EQ(waits_[1].ready_ns, 5u);
  EXPECT_EQ(waits_[1].arrived_ns, 6u);
  EXPECT_EQ(waits_[2].ready_ns + waits_[2].arrived_ns, 0u);
}

}  // namespace
}  // namespace epd::test
