// Calls of groups that break, are lost, and lose ranks and engines.

#include "engine_calls_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

using EngineCallsBreaksTest = EngineCallsFixture;

TEST_F(EngineCallsBreaksTest, ABadChoiceBreaksTheGroupAndCommandsAreDiscardedUntilItResumes) {
  run_and_check(0);
  const auto inputs = fill(1);
  group_->region<std::int32_t>(1, 1, Region::kTopkIdx)[0] = 6;
  const std::uint32_t bad = ringers_[1].ring(dispatch_on(1), 1, group_->epoch);
  ringers_[0].ring(dispatch_on(1), inputs[0].num_tokens, group_->epoch);
  const std::uint32_t of_host = ring(2, dispatch_on(1));
  const auto request = engine_of(1).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kInvalidArgument);
  EXPECT_EQ(body.failed_rank, 1);
  EXPECT_NE(std::string(body.text).find("operation 2: topk_idx[0,0] is 6 on rank 1"), std::string::npos)
      << body.text;
  EXPECT_TRUE(ringers_[1].ended(bad));
  const std::uint32_t after = ringers_[1].ring(combine_on(1), 0, group_->epoch);
  EXPECT_TRUE(ringers_[1].ended(after)) << "streams go on";
  EXPECT_EQ(ringers_[1].failed(), 2u);
  break_and_resume(body.cause);
  EXPECT_TRUE(ringers_[2].ended(of_host));
  EXPECT_NE(ringers_[2].end(of_host).ending, abi::CallEnding::kCarriedOut)
      << "discarded if it was taken too late";
  EXPECT_EQ(ringers_[1].end(bad).ending, abi::CallEnding::kFailed);
  EXPECT_EQ(ringers_[1].end(after).ending, abi::CallEnding::kDiscarded);
  EXPECT_EQ(next_, 2u);
  // Of an epoch that has gone.
  const std::uint32_t late = ringers_[0].ring(dispatch_on(0), 0, group_->epoch - 1);
  EXPECT_TRUE(ringers_[0].ended(late));
  EXPECT_EQ(ringers_[0].failed(), 2u);
  for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
}

// The routing of the last dispatch outlives a break: a combine of the new epoch uses it.
TEST_F(EngineCallsBreaksTest, RoutingsOutliveABreak) {
  for (std::uint32_t i = 0; i < 5; ++i) run_and_check(i % kShape.depth);
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  const auto answers = answer(0, inputs);
  const std::uint32_t alone = ringers_[0].ring(combine_on(0), 0, group_->epoch);  // nobody else comes
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  break_and_resume(StatusCode::kEngineRestarted);
  EXPECT_TRUE(ringers_[0].ended(alone));
  EXPECT_EQ(ringers_[0].failed(), 1u);
  run(Op::kCombine, 0, inputs);
  check_sums(0, inputs, answers);
  run_and_check(1);
}

TEST_F(EngineCallsBreaksTest, ACombineWithoutARoutingNamesTheRecord) {
  ringers_[0].ring(combine_on(1), 0, group_->epoch);
  const auto request = engine_of(0).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kNotFound);
  EXPECT_NE(std::string(body.text).find("the routing in record 1 of rank 0, which holds none"),
            std::string::npos)
      << body.text;
  break_and_resume(body.cause);
  run_and_check(1);
}

TEST_F(EngineCallsBreaksTest, TheDeadlineNamesTheRankThatIsMissing) {
  abi::Call brief = dispatch_on(0);
  brief.timeout_ms = 50;
  ringers_[1].ring(dispatch_on(0), 0, group_->epoch);
  ASSERT_TRUE(takes_part(1, 0, 0));
  ringers_[0].ring(brief, 0, group_->epoch);
  const auto request = engine_of(0).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(body.failed_rank, 2);
  EXPECT_NE(std::string(body.text).find("ended after 50 ms"), std::string::npos) << body.text;
  break_and_resume(body.cause);
  run_and_check(0);
}

TEST_F(EngineCallsBreaksTest, AStoppedRankHasSubmittedWhatItHasCompleted) {
  run_and_check(0);
  ringers_[0].ring(dispatch_on(1), 0, group_->epoch);  // waits for the others
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  engine_of(0).send(LinkType::kStopMember, abi::MemberRef{kGroup, 0, 0, 0});
  const auto stopped = engine_of(0).expect(LinkType::kMemberStopped);
  ASSERT_TRUE(stopped.has_value());
  EXPECT_EQ(stopped->read<abi::MemberRef>().value().next_submit, 2u);
}

TEST_F(EngineCallsBreaksTest, NobodyWaitsForAGroupThatIsGone) {
  ringers_[0].ring(dispatch_on(0), 0, group_->epoch);
  for (EngineThread* engine : engine_view_) engine->send(LinkType::kRemoveGroup, abi::GroupRef{kGroup});
  for (EngineThread* engine : engine_view_) ASSERT_TRUE(engine->expect(LinkType::kGroupRemoved).has_value());
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(is_closed(rank));
}

// Rank 2 is lost, and then another comes in its place: rows of the older routing that are there add nothing.
TEST_F(EngineCallsBreaksTest, AnOlderRoutingOutlivesTheLossOfARankAndItsReplacement) {
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  auto answers = answer(0, inputs);
  answers[2].y.assign(answers[2].y.size(), 0);
  const auto combined = reference::combine(params(), inputs, answers, {});
  const auto combine = [&] {
    run(Op::kCombine, 0, inputs, 0);
    for (const std::uint32_t rank : {0u, 1u}) {
      auto* out = group_->region<std::uint16_t>(rank, 0, Region::kOut);
      EXPECT_TRUE(std::equal(combined[rank].out.begin(), combined[rank].out.end(), out)) << "rank " << rank;
      std::fill_n(out, combined[rank].out.size(), std::uint16_t{0x7fc0});
    }
  };
  break_all(StatusCode::kRankLost);
  for (EngineThread* engine : engine_view_) group_->mask_rank(*engine, 2);
  there_ = {0, 1};
  resume_all();
  combine();
  break_all(StatusCode::kAborted);
  group_->replace(2, group_->epoch + 1);
  ringers_[2] = new_ringer(2);
  for (std::uint32_t engine = 0; engine < 2; ++engine)
    group_->tell_rank(engine_view_, session_view_, engine, 2);
  there_ = {0, 1, 2};
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  combine();
  ASSERT_FALSE(HasFatalFailure());
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(1);

  abi::Call again = dispatch_on(0);
  again.flags = abi::kFlagCached;
  const std::uint32_t refused = ringers_[0].ring(again, 0, group_->epoch);
  const auto request = engine_of(0).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kNotFound);
  const std::string text(body.text);
  for (const char* part : {"the routing in record 0 of rank 0 is of epoch 1", "lost or joined in epoch 3"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_TRUE(ringers_[0].ended(refused));
  break_and_resume(body.cause);
  run_and_check(0);
}

// What every rank has begun is completed, though nothing tells so when the group is lost.
TEST_F(EngineCallsBreaksTest, ALostGroupCompletesWhatAllHaveBegun) {
  run_and_check(0);
  const auto inputs = fill(1);
  const std::uint32_t third = ring(2, dispatch_on(1), inputs[2].num_tokens);
  const std::uint32_t first = ringers_[0].ring(dispatch_on(1), inputs[0].num_tokens, group_->epoch);
  const std::uint32_t second = ringers_[1].ring(dispatch_on(1), inputs[1].num_tokens, group_->epoch);
  lose(3);
  EXPECT_TRUE(ringers_[0].ended(first));
  EXPECT_TRUE(ringers_[1].ended(second));
  EXPECT_TRUE(ends_well(2, third));
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    EXPECT_EQ(ringers_[rank].failed(), 0u);
    EXPECT_EQ(group_->board(rank).next_index.load(), 3u);
    EXPECT_TRUE(is_closed(rank));
  }
}

// More than anybody can complete: calls end all the same, and soon.
TEST_F(EngineCallsBreaksTest, ALostGroupDoesNotWaitForWhoDoesNotCome) {
  run_and_check(0);
  const std::uint32_t alone = ringers_[0].ring(dispatch_on(1), 0, group_->epoch);
  lose(5);
  EXPECT_TRUE(ringers_[0].ended(alone));
  EXPECT_EQ(ringers_[0].failed(), 1u);
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(group_->board(rank).next_index.load(), 2u);
    EXPECT_TRUE(is_closed(rank));
  }
}

// Its last signals came with the break: the stream has gone on without the rows that came with them.
TEST_F(EngineCallsBreaksTest, AnAbortedCommandIsDoneAgainThoughEveryRankHasArrived) {
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

// As one whose rank rejoins when nobody else of the group was on its device. A kernel looks at the words of
// its rank's arena all the time.
TEST_F(EngineCallsBreaksTest, ARankThatIsToldOfAgainKeepsItsMemory) {
  run_and_check(0);
  for (int i = 0; i < 3; ++i) {
    break_all(StatusCode::kAborted);
    for (const std::uint32_t rank : {0u, 1u, 2u})
      group_->tell_rank(engine_view_, session_view_, rank % 2, rank);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    resume_all();
    ASSERT_FALSE(HasFatalFailure());
    run_and_check(i % kShape.depth);
  }
}

// The group is lost while rank 1's engine is away, and the next engine is never told of it.
TEST_F(EngineCallsBreaksTest, AnEngineThatIsBackClosesTheRingOfAGroupThatIsGone) {
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

TEST_F(EngineCallsBreaksTest, AnotherEngineGoesOnWhereTheRingStands) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  EXPECT_EQ(engines_[1]->stop(), 0);
  ringers_[1].ring(dispatch_on(0), 0, group_->epoch);  // nobody is there
  start_engine_1_again();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(comes([&] { return ringers_[1].failed() == 1; }));
  for (std::uint32_t i = 0; i < 5; ++i) run_and_check(i % kShape.depth);
}

// An engine's journal goes with it, and what it had not read of that is on no board.
TEST_F(EngineCallsBreaksTest, AnotherEngineKnowsWhatIsOnNoBoard) {
  const std::uint32_t slot = random_() % kShape.depth;
  std::uint32_t rounds = 3 + random_() % 5;
  SCOPED_TRACE(std::to_string(rounds) + " rounds and one on slot " + std::to_string(slot));
  while (rounds-- > 0) run_and_check(slot);
  const auto inputs = fill(slot);
  run(Op::kDispatch, slot, inputs);
  const auto answers = answer(slot, inputs);
  run(Op::kCombine, slot, inputs);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(engines_[1]->stop(), 0);
  const std::uint64_t last = next_ - 1;
  group_->board(1).next_index = 1;  // the first combine
  start_engine_1_again();
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_EQ(next_, last) << "all before what was begun last has ended";
  for (std::uint32_t rank = 0; rank < kRanks; ++rank)
    std::fill_n(group_->region<std::uint16_t>(rank, slot, Region::kOut),
                std::size_t{inputs[rank].num_tokens} * kShape.hidden, std::uint16_t{0x7fc0});
  run(Op::kCombine, slot, inputs);
  ASSERT_FALSE(HasFatalFailure());
  check_sums(slot, inputs, answers);
  run_and_check(slot);
}

// A break has undone what had been announced: nothing of it counts.
TEST_F(EngineCallsBreaksTest, AnotherEngineTakesNothingFromEarlierEpochs) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  break_all(StatusCode::kAborted);
  ASSERT_FALSE(HasFatalFailure());
  next_ = group_->resume_index = 2;
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(engines_[1]->stop(), 0);
  start_engine_1_again();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(next_, 2u);
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

// A graph may be replayed more often than a number has room for.
TEST_F(EngineCallsBreaksTest, NumbersOfCommandsAreCyclic) {
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
