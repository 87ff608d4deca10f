// An engine that comes after another: what it finds, and what it does.

#include "engine_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

class EngineRestartTest : public EngineOfEachKind {
 protected:
  // A dispatch and its combine that engine 1's board does not show when it ends: the first has ended for
  // sure.
  void unseen_round() {
    const std::uint32_t slot = random_() % kShape.depth;
    std::uint32_t rounds = random_() % 5;
    SCOPED_TRACE(std::to_string(rounds) + " rounds and one on slot " + std::to_string(slot));
    while (rounds-- > 0) run_and_check(slot);
    const auto inputs = fill(slot);
    const std::uint64_t unseen = next_;
    run(Op::kDispatch, slot, inputs);
    const auto answers = answer(slot, inputs);
    run(Op::kCombine, slot, inputs);
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_EQ(engines_[1]->stop(), 0);
    group_->board(1).next_index = unseen;
    start_engine_1_again();
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_EQ(next_, unseen + 1) << "all before what was begun last has ended";
    for (std::uint32_t rank = 0; rank < kRanks; ++rank)
      std::fill_n(group_->region<std::uint16_t>(rank, slot, Region::kOut),
                  std::size_t{inputs[rank].num_tokens} * kShape.hidden, std::uint16_t{0x7fc0});
    run(Op::kCombine, slot, inputs);
    ASSERT_FALSE(HasFatalFailure());
    check_sums(slot, inputs, answers);
    run_and_check(slot);
  }
  bool board_is(abi::GroupState state) {
    return group_->board(1).state.load() == static_cast<std::uint32_t>(state);
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, EngineRestartTest, kinds(), kind_name);

TEST_P(EngineRestartTest, AnotherEngineGoesOnWhereTheRingStands) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  EXPECT_EQ(engines_[1]->stop(), 0);
  ringers_[1].ring(dispatch_on(0), 0, group_->epoch);  // nobody is there
  start_engine_1_again();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(comes([&] { return ringers_[1].failed() == 1; }));
  for (std::uint32_t i = 0; i < 5; ++i) run_and_check(i % kShape.depth);
}

// An engine's journal goes with it. Peers may have gone on, and overwritten what it would take to do again
// what is on no board.
TEST_P(EngineRestartTest, AnotherEngineKnowsWhatIsOnNoBoard) {
  unseen_round();
}

// The same as tags begin again.
class EngineRestartNearWrapTest : public EngineRestartTest {
 protected:
  EngineRestartNearWrapTest() { first_op_ = 2 * abi::kTagRound - random_() % 10; }
};
INSTANTIATE_TEST_SUITE_P(Kinds, EngineRestartNearWrapTest, kinds(), kind_name);

TEST_P(EngineRestartNearWrapTest, AnotherEngineKnowsWhatIsOnNoBoard) {
  unseen_round();
}

// A break has undone what had been announced: nothing of it counts.
TEST_P(EngineRestartTest, AnotherEngineTakesNothingFromEarlierEpochs) {
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

// A client that is refused between kResume and the first operation asks the board at once which epoch it is.
TEST_P(EngineRestartTest, BoardsSayThatTheGroupIsBrokenUntilItGoesOn) {
  run_and_check(0);
  ASSERT_EQ(engines_[1]->stop(), 0);
  ASSERT_TRUE(board_is(abi::GroupState::kActive)) << "as an engine that was killed leaves it";
  break_without_engine_1();
  engines_[1]->start();
  session(1).add_to(*engine_view_[1]);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  EXPECT_TRUE(board_is(abi::GroupState::kBroken));
  EXPECT_EQ(group_->board(1).epoch.load(), group_->epoch);
  EXPECT_EQ(group_->board(1).cause.load(), static_cast<std::uint32_t>(StatusCode::kEngineRestarted));
  group_->resume_index = next_;
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(board_is(abi::GroupState::kActive));
  run_and_check(1);
}

TEST_P(EngineRestartTest, ANewEngineRingsForWhatTheOldOneMayHavePublished) {
  EXPECT_EQ(engines_[1]->stop(), 0);
  session(1).a().client_sleep.sleeping = 1;
  engines_[1]->start();
  session(1).add_to(*engine_view_[1]);
  EXPECT_TRUE(session(1).rung());
}

// However long the group's resume takes.
TEST_P(EngineRestartTest, AnEngineThatWaitsForAResumeSleeps) {
  run_and_check(0);
  EXPECT_EQ(engines_[1]->stop(), 0);
  ring(1, dispatch_on(0));
  break_without_engine_1();
  engines_[1]->start();
  session(1).add_to(*engine_view_[1]);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  const Mapping map = map_page(*engines_[1]);
  const auto& page = *map.as<abi::EnginePage>();
  const std::uint64_t before = page.sleeps.load();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(page.sleeps.load() - before, 100u) << "it does not sleep";
  EXPECT_TRUE(comes([&] { return ringers_[1].failed() == 1; })) << "discarded";
  group_->resume_index = next_ = 2;
  resume_all();
  run_and_check(0);
}

}  // namespace
}  // namespace epd::test
