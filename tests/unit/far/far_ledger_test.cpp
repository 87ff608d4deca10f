// A group's counts for each far engine: batches and their bytes on both sides, drops, stalls for credits.
#include "far_world.h"

#include <gtest/gtest.h>

namespace epd::far {
namespace {

using abi::FarBatch;

class Holder final : public Receiver {
 public:
  Drop receive(const Arrival& arrival) override {
    held.push_back(arrival);
    return Drop::kNone;
  }
  std::vector<Arrival> held;
};

// Rank 0 on node 0 sends rows to rank 1 on node 1.
class FarLedger : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kIndex = 0;

  FarLedger() : world_(testing_world::small_shape(2, 1), {0, 1}, 1) {
    world_.begin(1);
    group(0).rows_window(0, 1).enter(tag_);
    group(0).open(0, tag_, sender_);
    group(1).open(1, tag_, receiver_);
  }
  ~FarLedger() override {
    for (const Arrival& arrival : receiver_.held) group(1).settle(arrival);
    group(0).close(0, tag_);
    group(1).close(1, tag_);
  }

  FarGroup& group(std::uint32_t node) { return world_.group(node); }
  // As node `at` counts the other one's engine.
  abi::FarCounters& counters(std::uint32_t at) { return world_.ledger(at).counters(100 + (1 - at)); }
  void post_rows() {
    abi::FarHeader header{};
    header.type = abi::FarType::kRows;
    header.tag = tag_;
    header.from_rank = 0;
    header.to_rank = 1;
    header.batch = batches_++;
    header.records = 1;
    header.body_bytes = group(0).sizes().row_stride[0];
    group(0).post(header, group(0).take_rows(0, 1, tag_));
  }
  void fill_window() {
    while (group(0).room_for_rows(0, 1, tag_) != 0) post_rows();
  }
  template <typename Condition>
  bool steps_until(Condition condition) {
    for (int i = 0; i < 10'000; ++i) {
      if (condition()) return true;
      world_.step();
    }
    return false;
  }

  const std::uint64_t tag_ = abi::op_tag(1, kIndex);
  testing_world::World world_;
  Holder sender_;
  Holder receiver_;
  std::uint32_t batches_ = 0;
};

TEST_F(FarLedger, BatchesAndBytesAreCountedOnBothSides) {
  fill_window();
  ASSERT_GT(batches_, 0u);
  ASSERT_TRUE(steps_until([&] { return receiver_.held.size() == batches_; }));
  const auto rows = static_cast<std::size_t>(FarBatch::kRows);
  const std::uint64_t bytes = std::uint64_t{batches_} * group(0).sizes().row_stride[0];
  EXPECT_EQ(counters(0).batches_sent[rows], batches_);
  EXPECT_EQ(counters(0).bytes_sent[rows], bytes);
  EXPECT_EQ(counters(1).batches_received[rows], batches_);
  EXPECT_EQ(counters(1).bytes_received[rows], bytes);
  EXPECT_EQ(counters(0).batches_received[rows], 0u);
  EXPECT_EQ(counters(1).batches_sent[rows], 0u);
  for (const FarBatch other : {FarBatch::kAsks, FarBatch::kSums})
    EXPECT_EQ(counters(0).batches_sent[static_cast<std::size_t>(other)], 0u);
}

TEST_F(FarLedger, AStallLastsUntilACreditComes) {
  post_rows();
  group(0).wants_rows(0, 1);
  ASSERT_TRUE(steps_until([&] { return receiver_.held.size() == batches_; }));
  EXPECT_EQ(counters(0).credit_stalls, 0u) << "there are credits";
  fill_window();
  ASSERT_TRUE(steps_until([&] { return receiver_.held.size() == batches_; }));
  EXPECT_EQ(counters(0).credit_stalls, 0u) << "nobody wants any";
  group(0).wants_rows(0, 1);
  for (int i = 0; i < 100; ++i) {
    world_.step();
    group(0).wants_rows(0, 1);
  }
  EXPECT_EQ(counters(0).credit_stalls, 1u);
  const std::uint64_t so_far = counters(0).credit_stall_ns;
  EXPECT_GE(so_far, 99u * 10'000) << "it is told while it lasts";
  group(1).settle(receiver_.held.back());
  receiver_.held.pop_back();
  ASSERT_TRUE(steps_until([&] { return group(0).room_for_rows(0, 1, tag_) != 0; }));
  world_.step();
  const std::uint64_t in_all = counters(0).credit_stall_ns;
  EXPECT_GT(in_all, so_far);
  EXPECT_EQ(counters(0).longest_stall_ns, in_all);
  EXPECT_EQ(counters(0).longest_stall_rank, 1u);
  EXPECT_EQ(counters(0).longest_stall_group, testing_world::World::kGroup);
  for (int i = 0; i < 10; ++i) world_.step();
  EXPECT_EQ(counters(0).credit_stall_ns, in_all);
  EXPECT_EQ(counters(0).credit_stalls, 1u);
}

TEST_F(FarLedger, DropsAreCountedForTheirSender) {
  abi::FarHeader header{};
  header.magic = abi::kFarMagic;
  header.version = abi::kFarVersion;
  header.type = abi::FarType::kDone;
  header.group = testing_world::World::kGroup;
  header.tag = abi::op_tag(9, 0);
  header.time_ns = header.number = 1;
  header.to_rank = 1;
  world_.deliver(100, 101, header, {});
  EXPECT_EQ(counters(1).dropped[static_cast<std::size_t>(Drop::kEpoch)], 1u);
  EXPECT_EQ(counters(0).dropped[static_cast<std::size_t>(Drop::kEpoch)], 0u);
}

TEST_F(FarLedger, RanksAreNamedWithTheirNodes) {
  EXPECT_EQ(group(0).name_of_rank(1), "rank 1 on node-1");
}

}  // namespace
}  // namespace epd::far
