// Calls of groups that break, are lost, and lose ranks.

#include "engine_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

using EngineCallsBreaksTest = EngineOfEachKind;
INSTANTIATE_TEST_SUITE_P(Kinds, EngineCallsBreaksTest, kinds(), kind_name);

TEST_P(EngineCallsBreaksTest, ABadChoiceBreaksTheGroupAndCallsAreDiscardedUntilItResumes) {
  run_and_check(0);
  const auto inputs = fill(1);
  group_->region<std::int32_t>(1, 1, Region::kTopkIdx)[0] = 6;
  const std::uint32_t bad = ringers_[1].ring(dispatch_on(1), 1, group_->epoch);
  ringers_[0].ring(dispatch_on(1), inputs[0].num_tokens, group_->epoch);
  const std::uint32_t of_host = ring(2, dispatch_on(1));
  const std::string text = break_asked(1, StatusCode::kInvalidArgument, 1);
  EXPECT_NE(text.find("operation 2: topk_idx[0,0] is 6 on rank 1; allowed: 0 .. 5"), std::string::npos)
      << text;
  EXPECT_TRUE(ringers_[1].ended(bad));
  const std::uint32_t after = ringers_[1].ring(combine_on(1), 0, group_->epoch);
  EXPECT_TRUE(ringers_[1].ended(after)) << "streams go on";
  EXPECT_EQ(ringers_[1].failed(), 2u);
  break_and_resume(StatusCode::kInvalidArgument);
  EXPECT_TRUE(ringers_[2].ended(of_host));
  EXPECT_NE(ringers_[2].end(of_host).ending, abi::CallEnding::kCarriedOut)
      << "discarded if it was taken too late";
  EXPECT_EQ(ringers_[1].end(bad).ending, abi::CallEnding::kFailed);
  EXPECT_EQ(ringers_[1].end(after).ending, abi::CallEnding::kDiscarded);
  EXPECT_EQ(next_, 2u);
  // This call is of an epoch that has gone.
  const std::uint32_t late = ringers_[0].ring(dispatch_on(0), 0, group_->epoch - 1);
  EXPECT_TRUE(ringers_[0].ended(late));
  EXPECT_EQ(ringers_[0].failed(), 2u);
  for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
}

TEST_P(EngineCallsBreaksTest, RoutingsOutliveABreak) {
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

TEST_P(EngineCallsBreaksTest, ACombineWithoutARoutingNamesTheRecord) {
  ringers_[0].ring(combine_on(1), 0, group_->epoch);
  const std::string text = break_asked(0, StatusCode::kNotFound, 0);
  EXPECT_NE(text.find("the routing in record 1 of rank 0, which holds none"), std::string::npos) << text;
  break_and_resume(StatusCode::kNotFound);
  run_and_check(1);
}

TEST_P(EngineCallsBreaksTest, TheDeadlineNamesTheRankThatIsMissing) {
  abi::Call brief = dispatch_on(0);
  brief.timeout_ms = 50;
  ringers_[1].ring(dispatch_on(0), 0, group_->epoch);
  ASSERT_TRUE(takes_part(1, 0, 0));
  ringers_[0].ring(brief, 0, group_->epoch);
  const std::string text = break_asked(0, StatusCode::kDeadlineExceeded, 2);
  EXPECT_NE(text.find("ended after 50 ms"), std::string::npos) << text;
  break_and_resume(StatusCode::kDeadlineExceeded);
  run_and_check(0);
}

TEST_P(EngineCallsBreaksTest, DifferentSlotsAreNamed) {
  for (const std::uint32_t rank : {0u, 1u, 2u}) ring(rank, dispatch_on(rank == 2 ? 1 : 0));
  const auto request = engine_of(1).expect(LinkType::kBreakRequest);  // rank 2 may be the odd one, or others
  ASSERT_TRUE(request.has_value());
  const std::string text = request->read<abi::Break>().value().text;
  EXPECT_NE(text.find("slot is"), std::string::npos) << text;
}

// On a host device what it has begun may still end. A GPU has aborted that.
TEST_P(EngineCallsBreaksTest, AStoppedRankSaysWhatItHasCalled) {
  run_and_check(0);
  ringers_[0].ring(dispatch_on(1), 0, group_->epoch);  // waits for the others
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  engine_of(0).send(LinkType::kStopMember, abi::MemberRef{kGroup, 0, 0, 0});
  const auto stopped = engine_of(0).expect(LinkType::kMemberStopped);
  ASSERT_TRUE(stopped.has_value());
  EXPECT_EQ(stopped->read<abi::MemberRef>().value().next_submit, on_host() ? 3u : 2u);
}

TEST_P(EngineCallsBreaksTest, AnOlderRoutingOutlivesTheLossOfARankAndItsReplacement) {
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  auto answers = answer(0, inputs);
  answers[2].y.assign(answers[2].y.size(), 0);
  const auto combined = reference::combine(params(), inputs, answers, {});
  const auto combine = [&] {
    run(Op::kCombine, 0, inputs);
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
  const std::string text = break_asked(0, StatusCode::kNotFound, -1);
  for (const char* part : {"the routing in record 0 of rank 0 is of epoch 1", "lost or joined in epoch 3"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_TRUE(ringers_[0].ended(refused));
  break_and_resume(StatusCode::kNotFound);
  run_and_check(0);
}

TEST_P(EngineCallsBreaksTest, ALostGroupCompletesWhatAllHaveBegun) {
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

// The engine knows which calls a host device has begun, and so which all ranks have begun. A GPU's are not
// known.
TEST_P(EngineCallsBreaksTest, ALostGroupDoesNotWaitForWhoDoesNotCome) {
  run_and_check(0);
  const std::uint32_t alone = ringers_[0].ring(dispatch_on(1), 0, group_->epoch);
  lose(on_host() ? 2 : 5);
  EXPECT_TRUE(ringers_[0].ended(alone));
  EXPECT_EQ(ringers_[0].failed(), 1u);
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(group_->board(rank).next_index.load(), 2u);
    EXPECT_TRUE(is_closed(rank));
  }
}

TEST_P(EngineCallsBreaksTest, ARankThatIsToldOfAgainKeepsItsMemory) {
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

}  // namespace
}  // namespace epd::test
