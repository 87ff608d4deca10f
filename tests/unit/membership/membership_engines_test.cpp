// The group protocol and its engines: those that die, and those that do not answer.
#include "membership_fixture.h"

namespace epd::membership {
namespace {

// ---- engines that die

TEST_F(Membership, ADeadEngineBreaksTheOthersAndGoesOnWhereBoardsSay) {
  activate(4);  // ranks 0, 2 on device 0; 1, 3 on device 1
  engine_down(0, "the engine of host:0 died");
  EXPECT_EQ(take(), (Lines{"break device=1 group=1 epoch=1 fatal=0 cause=ENGINE_RESTARTED failed_rank=-1"}));
  broken(1, 9);
  EXPECT_TRUE(take().empty());
  engine_up(0);
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=1"}));
  EXPECT_EQ(group().reason.text, "ranks 0, 2: the engine of host:0 died");
  memory_.board_index[{1, 0}] = 8;
  memory_.board_index[{1, 2}] = 7;
  ready(0);
  EXPECT_EQ(take(), (Lines{"resume device=0 group=1 epoch=2 index=7 cause=ENGINE_RESTARTED",
                           "resume device=1 group=1 epoch=2 index=7"}));
  EXPECT_TRUE(memory_.lost.empty());
}

TEST_F(Membership, AnEngineThatDiesAgainBeforeItIsReadyIsToldAgain) {
  activate(2);
  engine_down(0, "died");
  engine_up(0);
  take();
  engine_down(0, "died again");
  EXPECT_TRUE(take().empty());
  broken(1, 0);
  engine_up(0);
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=1"}));
  ready(0);
  EXPECT_EQ(take().size(), 2u);
}

TEST_F(Membership, AllEnginesDeadStillResume) {
  activate(2);
  engine_down(0, "died");
  engine_down(1, "died");
  take();
  engine_up(1);
  engine_up(0);
  memory_.board_index[{1, 0}] = 3;
  memory_.board_index[{1, 1}] = 2;
  ready(1);
  take();
  ready(0);
  EXPECT_EQ(take(), (Lines{"resume device=0 group=1 epoch=2 index=2 cause=ENGINE_RESTARTED",
                           "resume device=1 group=1 epoch=2 index=2 cause=ENGINE_RESTARTED"}));
}

TEST_F(Membership, AGroupThatStartsWaitsForARestartedEngine) {
  join(request(0, 2));
  join(request(1, 2));
  take();
  engine_down(1, "died");
  ready(0);
  EXPECT_TRUE(take().empty());
  engine_up(1);
  EXPECT_EQ(take(), (Lines{"start device=1 group=1 broken=0"}));
  ready(1);
  EXPECT_EQ(take().size(), 2u);
  EXPECT_EQ(group().epoch, 1u);
}

TEST_F(Membership, AGroupOfWhichAnEngineDiesAgainAndAgainIsRefused) {
  join(request(0, 2));
  join(request(1, 2));
  ready(0);
  for (int i = 0; i < 2; ++i) {
    engine_down(1, "died");
    engine_up(1);
  }
  take();
  engine_down(1, "it was killed by signal 6");
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=INTERNAL",
                           "refused session=11 request=101 status=INTERNAL", "remove device=0 group=1"}));
  EXPECT_EQ(
      refusal_.message(),
      "the engine of device 1 went down 3 times while it started group \"g\", at last: it was killed by "
      "signal 6");
  engine_up(1);
  EXPECT_TRUE(take().empty()) << "it is not told of the group again";
  removed(0);
  EXPECT_FALSE(known());
}

// A group that has run may be the bystander of one that kills its engine.
TEST_F(Membership, AGroupThatCantGoOnOnAnEngineEndsLater) {
  activate(2);
  for (int i = 0; i < 3; ++i) {
    engine_down(1, "died");
    engine_up(1);
  }
  ready(1);
  broken(0, 0);
  take();
  resumed(0, 2);
  resumed(1, 2);
  EXPECT_EQ(group().phase(), GroupPhase::kActive) << "it was ready between";
  for (int i = 0; i < 6; ++i) {
    engine_down(1, "died");
    engine_up(1);
    EXPECT_EQ(group().phase(), GroupPhase::kBreaking) << i;
  }
  engine_down(1, "died");
  EXPECT_EQ(group().phase(), GroupPhase::kFailing);
  EXPECT_EQ(group().reason.cause, StatusCode::kRankLost);
  EXPECT_EQ(
      group().reason.text,
      "rank 1 was lost: the engine can't serve the group: the engine of device 1 went down 6 times while it "
      "started group \"g\", at last: died");
}

TEST_F(Membership, AnEngineCantSayThatAnOperationIsToBeTriedAgain) {
  for (const StatusCode said :
       {StatusCode::kOk, StatusCode::kWouldBlock, StatusCode::kDaemonLost, static_cast<StatusCode>(77)})
    EXPECT_EQ(said_cause(said, StatusCode::kAborted), StatusCode::kAborted);
  EXPECT_EQ(said_cause(StatusCode::kDeadlineExceeded, StatusCode::kAborted), StatusCode::kDeadlineExceeded);
  activate(2);
  say(1, abi::Break{1, 1, 0, 0, StatusCode::kWouldBlock, 0, {}});
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=0 cause=ABORTED failed_rank=0",
                           "break device=1 group=1 epoch=1 fatal=0 cause=ABORTED failed_rank=0"}));
}

TEST_F(Membership, AGroupFormedWhileAnEngineIsDownStartsWhenItIsBack) {
  engine_down(1, "died");
  join(request(0, 2));
  join(request(1, 2));
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=0"}));
  ready(0);
  engine_up(1);
  EXPECT_EQ(take(), (Lines{"start device=1 group=1 broken=0"}));
}

TEST_F(Membership, ARankThatDiesWithItsEngineFailsFromItsBoard) {
  activate(3);  // rank 1 alone on device 1
  memory_.board_index[{1, 1}] = 4;
  engine_down(1, "died");
  take();
  session_closed(11, "died");
  EXPECT_TRUE(take().empty()) << "device 0 still owes the kBroken of the recoverable break";
  broken(0, 5);
  EXPECT_EQ(take_breaks(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=4"}));
  broken(0, 5);
  EXPECT_EQ(group().phase(), GroupPhase::kLost);
  engine_up(1);
  EXPECT_TRUE(take().empty()) << "a lost group is not told to a new engine";
}

TEST_F(Membership, AnEngineThatDiesInAFatalBreakLeavesItsBoardsToTheSupervisor) {
  activate(3);
  session_closed(11, "died");
  stopped(1, 2);
  take();
  memory_.board_index[{1, 0}] = memory_.board_index[{1, 2}] = 1;
  engine_down(0, "died");
  EXPECT_EQ(take(),
            (Lines{"wake session=10", "wake session=12",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=1"}))
      << "what the dead engine had taken of its ranks beyond their boards fails";
  EXPECT_EQ(memory_.lost.at(0), "rank 1 (session 11, pid 1001) died");
  EXPECT_EQ(memory_.lost.count(2), 1u);
  broken(1, 2);
  EXPECT_EQ(group().phase(), GroupPhase::kLost);
  leave(10, 500, members_.at(10));
  leave(12, 501, members_.at(12));
  EXPECT_EQ(take(),
            (Lines{"left session=10 request=500", "left session=12 request=501", "remove device=1 group=1"}))
      << "the dead engine has nothing to forget";
  removed(1);
  EXPECT_FALSE(known());
}

TEST_F(Membership, AnEngineThatDiesBeforeItStopsAMemberIsAnsweredForFromTheBoard) {
  activate(2);
  memory_.board_index[{1, 1}] = 11;
  leave(11, 500, members_.at(11));
  take();
  engine_down(1, "died");
  EXPECT_EQ(take_breaks(),
            (Lines{"left session=11 request=500",
                   "break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=11"}));
}

TEST_F(Membership, AnEngineThatDiesWhileItForgetsHasForgotten) {
  activate(2);
  session_closed(10, "died");
  session_closed(11, "died");
  stopped(0, 0);
  stopped(1, 0);
  broken(0, 0);
  broken(1, 0);
  removed(0);
  engine_down(1, "died");
  EXPECT_FALSE(known());
  EXPECT_TRUE(memory_.held.empty());
}

TEST_F(Membership, ARestartedEngineThatCannotServeTheGroupEndsIt) {
  activate(2);
  engine_down(0, "died");
  broken(1, 3);
  engine_up(0);
  take();
  say(0, abi::GroupReady{1, StatusCode::kInternal, "arena lost"});
  EXPECT_EQ(take(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=0 fail_from=0",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=0 fail_from=0"}));
  EXPECT_EQ(group().reason.text, "rank 0 was lost: the engine can't serve the group: arena lost");
}

// ---- engines that do not answer

TEST_F(Membership, AnUnansweredStopKillsTheEngine) {
  activate(2);
  session_closed(11, "died");
  take();
  clock_.advance_ms(2'999);
  tick();
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 1'000'000);
  clock_.advance_ms(1);
  tick();
  EXPECT_EQ(take(), (Lines{"kill device=1"}));
  engine_down(1, "killed");
  EXPECT_EQ(take_breaks(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=0"}));
}

// The supervisor does not kill a stopped engine. The operations that its rank had submitted can't be known
// then.
TEST_F(Membership, AnEngineThatIsStoppedDoesNotKeepTheOthersFromTheFatalBreak) {
  activate(2);
  leave(11, 500, members_.at(11));
  take();
  clock_.advance_ms(3'000);
  tick();
  EXPECT_EQ(take(), (Lines{"kill device=1"}));
  clock_.advance_ms(3'000);
  tick();
  EXPECT_EQ(take_breaks(),
            (Lines{"kill device=1", "left session=11 request=500",
                   "break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=0",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=0"}));
  broken(0, 0);
  stopped(1, 4);  // it continues
  broken(1, 4);
  EXPECT_EQ(group().phase(), GroupPhase::kLost);
}

TEST_F(Membership, AnUnansweredRecoverableBreakReleasesTheOthersThenKillsTheEngineAgainAndAgain) {
  activate(2);
  request_break(0);
  broken(0, 0);
  take();
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 1'000'000'000) << "a third of engine_ack_ms";
  clock_.advance_ms(1'000);
  tick();
  EXPECT_EQ(take(), (Lines{"release device=0 group=1"}));
  for (int turn = 0; turn < 3; ++turn) {
    clock_.advance_ms(turn == 0 ? 2'000 : 3'000);
    tick();
    EXPECT_EQ(take(), (Lines{"kill device=1"})) << turn;
  }
  broken(1, 0);  // it was only stopped
  EXPECT_EQ(take(),
            (Lines{"resume device=0 group=1 epoch=2 index=0", "resume device=1 group=1 epoch=2 index=0"}));
}

TEST_F(Membership, AnEngineThatAcknowledgesAfterTheGraceIsReleasedAtOnce) {
  activate(4);  // ranks 0, 2 on device 0; 1, 3 on device 1
  request_break(0);
  take();
  clock_.advance_ms(1'000);
  tick();
  EXPECT_TRUE(take().empty());
  broken(0, 0);
  EXPECT_EQ(take(), (Lines{"release device=0 group=1"}));
  tick();
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 2'000'000'000);
}

TEST_F(Membership, AFatalBreakHasTimeForRunningOperationsThenFailsThemThenKills) {
  activate(2);
  session_closed(11, "died");
  stopped(1, 4);
  stopped(0, 4);
  take();
  broken(1, 4);
  clock_.advance_ms(3'000);
  tick();
  EXPECT_TRUE(take().empty()) << "operations below 4 may still run";
  clock_.advance_ms(30'000);
  tick();
  EXPECT_EQ(take(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=0"}));
  clock_.advance_ms(3'000);
  tick();
  EXPECT_EQ(take(), (Lines{"kill device=0"}));
}

TEST_F(Membership, AnUnansweredCommitAndRemovalKillTheEngine) {
  join(request(0, 2));
  join(request(1, 2));
  take();
  ready(0);
  clock_.advance_ms(10'000);
  tick();
  EXPECT_EQ(take(), (Lines{"kill device=1"}));
  engine_down(1, "killed");
  session_closed(10, "died");
  EXPECT_EQ(take(), (Lines{"refused session=11 request=101 status=RANK_LOST", "remove device=0 group=1"}));
  clock_.advance_ms(3'000);
  tick();
  EXPECT_EQ(take(), (Lines{"kill device=0"}));
  engine_down(0, "killed");
  EXPECT_FALSE(known());
}

}  // namespace
}  // namespace epd::membership
