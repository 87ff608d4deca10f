// Calls beside other ranks and groups of the same GPU.

#include "engine_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

class EngineCallsRoomTest : public EngineFixture {
 protected:
  // To the dispatch on slot 0 that rank 0 has asked for by call `waits`: all end it well.
  void others_come(const std::vector<reference::RankInput>& inputs, std::uint32_t waits) {
    const std::uint32_t last = ringers_[1].ring(dispatch_on(0), inputs[1].num_tokens, group_->epoch);
    const std::uint32_t of_host = ring(2, dispatch_on(0), inputs[2].num_tokens);
    EXPECT_TRUE(ringers_[0].ended(waits));
    EXPECT_TRUE(ringers_[1].ended(last));
    EXPECT_TRUE(ends_well(2, of_host));
  }
};

// A group of one rank, beside the fixture's.
abi::GroupShape alone() {
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.num_experts = 2;
  return shape;
}

// Its operations have SMs of their own, whatever those of others wait for.
TEST_F(EngineCallsRoomTest, AnotherGroupComesWorksAndGoesWhileACallWaits) {
  const auto inputs = fill(0);
  const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  ASSERT_TRUE(begins_alone(0, 0));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  for (const std::int32_t priority : {3, -8, 0}) {
    RawGroup beside(8, alone(), "cuda", 1);
    beside.priority = priority;
    beside.add_to_engine({engine_view_[0]}, {&other}, 0, false);
    Ringer ringer(beside.words(0), beside.results(0));
    for (const Op op : {Op::kNoop, Op::kDispatch, Op::kCombine})
      EXPECT_TRUE(ringer.ends_well(ringer.ring(call_on(op, 0), 0, 1)));
    engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
    ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
    EXPECT_TRUE(comes([&] { return beside.words(0).closed == 1; }));
  }
  EXPECT_FALSE(ringers_[0].ended(waits, 0));
  others_come(inputs, waits);
  next_ = 1;
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

// As it would not pass an operation that runs.
TEST_F(EngineCallsRoomTest, ANoopOfTheOtherRingDoesNotPassACallThatWaitsForARankOfTheDevice) {
  Ringer host(group_->words(0), group_->results(0), true);
  for (std::uint32_t i = 0; i < 20; ++i) {
    const auto inputs = fill(0);
    const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
    EXPECT_TRUE(ends_well(2, ring(2, kNoopCall)));
    ASSERT_TRUE(tells_call(0, i, 0));
    const std::uint32_t noop = host.ring(kNoopCall, 0, group_->epoch);
    EXPECT_TRUE(comes([&] { return std::atomic_ref(group_->words(0).bell[1]).load() == 0; }));
    EXPECT_FALSE(ringers_[0].ended(waits, 0));
    EXPECT_FALSE(takes_part(0, i, 0, 0));
    EXPECT_FALSE(host.ended(noop, 0));
    others_come(inputs, waits);
    EXPECT_TRUE(host.ended(noop));
    next_ = i + 1;
  }
  run_and_check(1);
}

}  // namespace
}  // namespace epd::test
