// Messages that a group does not take: each by its reason, and nothing of it stays.
#include "far_world.h"

#include <functional>
#include <string>

namespace epd::far {
namespace {

class FarJudge : public ::testing::Test, private Receiver {
 protected:
  static constexpr std::uint32_t kDepth = 2;
  FarJudge() : world_(testing_world::small_shape(3, kDepth), {0, 1, 1}, 1) { world_.begin(2); }
  ~FarJudge() override {
    if (group().in_epoch()) group().close(1, abi::op_tag(2, 0));
    for (const Arrival& arrival : taken_) group().settle(arrival);
  }

  Drop receive(const Arrival& arrival) override {
    taken_.push_back(arrival);
    return Drop::kNone;
  }
  FarGroup& group() { return world_.group(1); }

  // Rank 0, on node 0, to its gateway there.
  abi::FarHeader rows() {
    abi::FarHeader h{};
    h.magic = abi::kFarMagic;
    h.version = abi::kFarVersion;
    h.type = abi::FarType::kRows;
    h.token = message_token(testing_world::World::key(2), 100, 101);
    h.tag = abi::op_tag(2, 0);
    h.group = testing_world::World::kGroup;
    h.time_ns = 1;
    h.number = ++number_;
    h.from_rank = 0;
    h.to_rank = 1;
    h.records = 1;
    h.body_bytes = group().sizes().row_stride[0];
    return h;
  }
  void deliver(abi::FarHeader header, EngineId from = 100) {
    const std::vector<std::byte> body(header.body_bytes);
    seal(header, body, abi::FarCheck::kCrc);
    world_.deliver(from, 101, header, body);
  }
  void open() { group().open(1, abi::op_tag(2, 0), *this); }

  testing_world::World world_;
  std::uint64_t number_ = 0;
  std::vector<Arrival> taken_;
};

TEST_F(FarJudge, EachFieldThatIsWrongByItsReason) {
  struct Wrong {
    const char* what;
    Drop reason;
    std::function<void(abi::FarHeader&)> spoil;
  };
  const std::vector<Wrong> all{
      {"not this protocol", Drop::kHeader, [](auto& h) { h.magic ^= 1; }},
      {"a field that its type may not have", Drop::kHeader, [](auto& h) { h.batches = 1; }},
      {"another group", Drop::kGroup, [](auto& h) { ++h.group; }},
      {"an older epoch", Drop::kEpoch, [](auto& h) { h.tag = abi::op_tag(1, 0); }},
      {"an epoch to come", Drop::kEpoch, [](auto& h) { h.tag = abi::op_tag(3, 0); }},
      {"another epoch's key", Drop::kToken,
       [](auto& h) { h.token = message_token(testing_world::World::key(1), 100, 101); }},
      {"the other direction's token", Drop::kToken,
       [](auto& h) { h.token = message_token(testing_world::World::key(2), 101, 100); }},
      {"a rank that is not there", Drop::kRanks, [](auto& h) { h.from_rank = 3; }},
      {"a rank of another engine", Drop::kRanks, [](auto& h) { h.from_rank = 2; }},
      {"to a rank that is not its gateway", Drop::kRanks, [](auto& h) { h.to_rank = 2; }},
      {"rows that are not of this size", Drop::kRecords, [](auto& h) { h.body_bytes += 16; }},
      {"a batch beyond the largest", Drop::kRecords,
       [this](auto& h) {
         h.records = 1 + group().sizes().rows_per_batch(group().sizes().row_stride[0]);
         h.body_bytes = h.records * group().sizes().row_stride[0];
       }},
      {"credits that were never out", Drop::kCredit, [](auto& h) { h.row_credits = 1; }},
      {"an operation that cannot have begun", Drop::kOperation,
       [](auto& h) { h.tag = abi::op_tag(2, 2 * kDepth); }},
      {"an announcement that is cut off", Drop::kRecords,
       [](auto& h) {
         h.type = abi::FarType::kAnnounce;
         h.records = 2;
         h.body_bytes = sizeof(abi::FarAnnouncement) + 8;
       }},
      {"a greeting", Drop::kType,
       [](auto& h) {
         h.type = abi::FarType::kGreeting;
         h.tag = abi::far_epoch_tag(2);
         h.from_rank = h.to_rank = abi::kFarNoRank;
         h.records = 0;
         h.body_bytes = sizeof(abi::FarGreeting);
       }},
  };
  open();
  for (const Wrong& wrong : all) {
    SCOPED_TRACE(wrong.what);
    const std::uint64_t before = group().drops().of(wrong.reason);
    const std::uint64_t total = group().drops().total();
    abi::FarHeader header = rows();
    wrong.spoil(header);
    deliver(header);
    EXPECT_EQ(group().drops().of(wrong.reason), before + 1) << group().drops().text();
    EXPECT_EQ(group().drops().total(), total + 1);
    EXPECT_TRUE(taken_.empty());
    EXPECT_EQ(world_.held(), 0u);
  }
  deliver(rows(), 999);
  EXPECT_EQ(group().drops().of(Drop::kEngine), 1u);
  deliver(rows());
  EXPECT_EQ(taken_.size(), 1u) << "what is right is taken";
}

TEST_F(FarJudge, MoreBatchesThanTheWindowHas) {
  open();
  for (std::uint32_t i = 0; i < group().sizes().window; ++i) deliver(rows());
  EXPECT_EQ(group().drops().total(), 0u);
  deliver(rows());
  EXPECT_EQ(group().drops().of(Drop::kCredit), 1u);
}

TEST_F(FarJudge, WhatComesEarlyWaitsAndIsBounded) {
  abi::FarHeader announce = rows();
  announce.type = abi::FarType::kAnnounce;
  announce.records = 0;
  announce.body_bytes = sizeof(abi::FarAnnouncement);
  deliver(announce);
  deliver(rows());
  announce.number = ++number_;
  deliver(announce);
  EXPECT_EQ(group().drops().of(Drop::kTwice), 1u);
  open();
  EXPECT_EQ(taken_.size(), 2u);
}

TEST(FarSizesTest, EachRowFormatHasItsStrideAndBatchesHaveRoomForTheLargest) {
  abi::GroupShape shape = testing_world::small_shape(3, 2);
  shape.payload = abi::Payload::kFp8Cast;
  shape.num_more_formats = 1;  // bf16
  const FarSizes sizes(shape, 2, 0, 0);
  for (std::uint32_t format = 0; format < 2; ++format) {
    const FarSizes alone(shape.with_format(format), 2, 0, 0);
    EXPECT_EQ(sizes.row_stride[format], alone.row_stride[0]);
    EXPECT_EQ(alone.row_stride[1], 0u);
  }
  EXPECT_LT(sizes.row_stride[0], sizes.row_stride[1]);
  EXPECT_GE(sizes.batch_bytes, sizes.row_stride[1]);
  EXPECT_EQ(sizes.row_stride[2], 0u);
}

TEST_F(FarJudge, WhatComesLateIsDropped) {
  open();
  group().close(1, abi::op_tag(2, 0));
  deliver(rows());
  EXPECT_EQ(group().drops().of(Drop::kOperation), 1u);
}

TEST_F(FarJudge, ABreakGivesBackWhatWaitsAndWindowsAreFullAgain) {
  const abi::FarHeader early = rows();
  deliver(early);
  EXPECT_EQ(world_.held(), 1u);
  group().end();
  EXPECT_EQ(world_.held(), 0u);
  deliver(early);
  EXPECT_EQ(group().drops().of(Drop::kBroken), 1u);
  group().begin(world_.of(3, 1));
  deliver(early);
  EXPECT_EQ(group().drops().of(Drop::kEpoch), 1u);
  EXPECT_EQ(group().unsettled(), "");
}

}  // namespace
}  // namespace epd::far
