// Calls of streams in groups that break or end.

#include "engine_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

// Where streams wait, or numbers are of their ring.
using EngineStreamsBreaksTest = EngineFixture;

TEST_F(EngineStreamsBreaksTest, NobodyWaitsForAGroupThatIsGone) {
  ringers_[0].ring(dispatch_on(0), 0, group_->epoch);
  for (EngineThread* engine : engine_view_) engine->send(LinkType::kRemoveGroup, abi::GroupRef{kGroup});
  for (EngineThread* engine : engine_view_) ASSERT_TRUE(engine->expect(LinkType::kGroupRemoved).has_value());
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(is_closed(rank));
}

TEST_F(EngineStreamsBreaksTest, AnAbortedCallIsDoneAgainThoughEveryRankHasArrived) {
  for (std::uint32_t i = 0; i < 2; ++i) run_and_check(0);
  const auto inputs = fill(0);
  const std::uint32_t aborted = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  all_arrive_at(0, next_);
  const std::uint64_t failed = next_;
  break_all(StatusCode::kRankLost);
  EXPECT_TRUE(ringers_[0].ended(aborted));
  EXPECT_EQ(ringers_[0].failed(), 1u);
  EXPECT_EQ(group_->board(0).next_index.load(), failed);
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(0);
}

TEST_F(EngineStreamsBreaksTest, AnEngineThatIsBackClosesTheRingOfAGroupThatIsGone) {
  run_and_check(0);
  EXPECT_EQ(engines_[1]->stop(), 0);
  abi::CallWords& words = group_->words(1);
  words.closed = 0;  // as if it had been killed
  std::fill(std::begin(words.flags), std::end(words.flags), 0);
  ringers_[1].ring(dispatch_on(0), 3, group_->epoch, true);
  engines_[1]->start();
  session(1).add_to(*engine_view_[1]);
  group_->close_streams(*engine_view_[1], 1);
  EXPECT_TRUE(is_closed(1));
  EXPECT_EQ(engines_[1]->stop(), 0);
}

TEST_F(EngineStreamsBreaksTest, NumbersOfCallsAreCyclic) {
  const auto numbered = [](abi::Call call, std::uint32_t number) {
    call.number = number;
    call.epoch = 1;
    return call;
  };
  run_and_check(0);
  EXPECT_EQ(engines_[1]->stop(), 0);
  const std::uint32_t number = 0u - 8 - random_() % 32;
  SCOPED_TRACE(number);
  abi::CallWords& words = group_->words(1);
  for (std::uint32_t before = number - abi::kCallSlots; before != number; ++before)
    store_call(words.calls, numbered(kNoopCall, before));
  words.tail = words.done = number;
  start_engine_1_again();
  ASSERT_FALSE(HasFatalFailure());
  for (std::uint32_t i = 0; i < 40; ++i) {
    run_and_check(i % kShape.depth);
    const std::uint32_t noop = ringers_[1].ring(kNoopCall, 0, group_->epoch, true);
    ASSERT_TRUE(ringers_[1].ended(noop));
    EXPECT_EQ(words.flags[kNoopFlag], 1u);
  }
  EXPECT_EQ(ringers_[1].done(), number + 3 * 40);
  EXPECT_EQ(ringers_[1].failed(), 0u);
}

}  // namespace
}  // namespace epd::test
