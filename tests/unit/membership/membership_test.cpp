// The group protocol without processes: leaving, dying, breaking.
#include "membership_fixture.h"

namespace epd::membership {
namespace {

// ---- leaving and dying

TEST_F(Membership, ADeadRankBreaksTheGroupFromItsFirstUnsubmittedOperation) {
  activate(3);
  session_closed(12, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=0 group=1 rank=2"}));
  stopped(2, 7);
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=7",
                           "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=7",
                           "stop_member device=0 group=1 rank=0", "stop_member device=1 group=1 rank=1"}));
  stopped(0, 7);
  stopped(1, 8);
  EXPECT_TRUE(take().empty()) << "all had submitted what lies below 7";
  EXPECT_EQ(break_text_, "rank 2 (session 12, pid 1002) died");
  broken(0, 7);
  EXPECT_EQ(memory_.held.count({1, 2}), 1u) << "device 1 may still write there";
  broken(1, 7);
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(group().phase(), GroupPhase::kLost);
  EXPECT_EQ(memory_.held.count({1, 2}), 0u);
  EXPECT_EQ(memory_.held.size(), 2u) << "the living keep theirs until they leave";

  leave(10, 500, members_.at(10));
  EXPECT_EQ(take(), (Lines{"left session=10 request=500"}));
  session_closed(11, "died");
  EXPECT_EQ(take(), (Lines{"remove device=0 group=1", "remove device=1 group=1"}));
  removed(0);
  EXPECT_TRUE(known());
  removed(1);
  EXPECT_FALSE(known());
  EXPECT_TRUE(memory_.held.empty());
}

TEST_F(Membership, LeavingIsAnsweredWhenTheEngineHasStoppedTheMember) {
  activate(2);
  leave(11, 501, members_.at(11));
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=1"}));
  stopped(1, 3);
  EXPECT_EQ(take_breaks(),
            (Lines{"left session=11 request=501",
                   "break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=3",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=3"}));
  EXPECT_EQ(break_text_, "rank 1 (session 11, pid 1001) left");
  leave(11, 502, members_.at(11));
  EXPECT_EQ(take(), (Lines{"refused session=11 request=502 status=NOT_FOUND"}));
}

TEST_F(Membership, ForeignAndStaleMembersCannotBeLeft) {
  activate(2);
  leave(10, 500, members_.at(10) + 0x10000);
  leave(10, 501, members_.at(10) + 1);
  leave(99, 502, members_.at(10));
  EXPECT_EQ(take(), (Lines{"refused session=10 request=500 status=NOT_FOUND",
                           "refused session=10 request=501 status=NOT_FOUND",
                           "refused session=99 request=502 status=NOT_FOUND"}));
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
}

TEST_F(Membership, MemberNumbersAreNotReusedWhileAnEngineKnowsThem) {
  activate(1);
  const std::uint32_t first = members_.at(10);
  leave(10, 500, first);
  stopped(0, 0);
  broken(0, 0);
  take();
  join(request(0, 1, "next"));
  ready(0, 2);
  take();
  EXPECT_NE(member_index(members_.at(10)), member_index(first));
  removed(0);
  join(request(0, 1, "third"));
  ready(0, 3);
  take();
  EXPECT_EQ(member_index(members_.at(10)), member_index(first));
  EXPECT_NE(members_.at(10), first) << "another generation";
}

TEST_F(Membership, ALostGroupDoesNotKeepItsName) {
  activate(2);
  leave(10, 500, members_.at(10));
  take();
  join(request(0, 2));
  join(request(1, 2));
  const Lines lines = take();
  EXPECT_EQ(lines, (Lines{"start device=0 group=2 broken=0", "start device=1 group=2 broken=0"}));
}

TEST_F(Membership, AnEvictedRankIsLostLikeOneThatLeft) {
  activate(2);
  evict(1, 1, "was evicted by operator: too slow");
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=1"}));
  stopped(1, 5);
  take();
  EXPECT_NE(break_text_.find("rank 1 (session 11, pid 1001) was evicted by operator: too slow"),
            std::string::npos)
      << break_text_;
  EXPECT_EQ(group().phase(), GroupPhase::kFailing);
  EXPECT_TRUE(group().members.at(1).gone());
}

TEST_F(Membership, AnEvictedRankThatStillJoinsIsRefused) {
  join(request(0, 3));
  join(request(1, 3));
  evict(1, 1, "was evicted by operator");
  take();
  EXPECT_EQ(refusal_.code(), StatusCode::kAborted);
  EXPECT_EQ(refusal_.message(), "rank 1 was evicted by operator");
  EXPECT_EQ(group().members.size(), 1u) << "the other one waits on";
  join(request(1, 3));
  join(request(2, 3));
  take();
  ASSERT_EQ(group().phase(), GroupPhase::kStarting);
  evict(1, 2, "was evicted by operator");
  std::size_t refused = 0;
  for (const std::string& line : take()) refused += line.starts_with("refused") ? 1 : 0;
  EXPECT_EQ(refused, 3u) << "all of them, each once";
}

TEST_F(Membership, OperationsThatALivingRankHadNotSubmittedFailAtOnce) {
  activate(3);
  session_closed(12, "died");
  stopped(2, 9);
  take();
  stopped(0, 9);
  EXPECT_TRUE(take().empty()) << "rank 1 has not been heard of";
  stopped(1, 5);
  EXPECT_EQ(take(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=5",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=5"}));
  broken(0, 5);
  broken(1, 5);
  EXPECT_EQ(group().phase(), GroupPhase::kLost);
}

TEST_F(Membership, AnEngineThatHasLetGoIsNotBrokenAgain) {
  activate(2);
  session_closed(11, "died");
  stopped(1, 9);
  take();
  broken(1, 9);
  stopped(0, 5);
  EXPECT_EQ(take(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=5"}));
}

TEST_F(Membership, AFurtherLossInAFatalBreakIsAnsweredLikeTheFirst) {
  activate(3);
  session_closed(12, "died");
  stopped(2, 9);
  take();
  leave(11, 500, members_.at(11));
  EXPECT_TRUE(take().empty()) << "it has been asked already";
  stopped(1, 9);
  EXPECT_EQ(take(), (Lines{"left session=11 request=500"}));
  session_closed(10, "died");
  stopped(0, 9);
  broken(0, 9);
  broken(1, 9);
  EXPECT_EQ(take(), (Lines{"remove device=0 group=1", "remove device=1 group=1"}));
}

TEST_F(Membership, RanksThatDieTogetherGiveOneBreakFromTheLowest) {
  activate(4);
  session_closed(12, "died");
  session_closed(13, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=0 group=1 rank=2", "stop_member device=1 group=1 rank=3"}));
  stopped(2, 8);
  EXPECT_TRUE(take().empty());
  stopped(3, 6);
  EXPECT_EQ(take_breaks(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=6",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=6"}));
}

// An engine that is stopped is not killed; its joiners wait no longer than they asked for.
TEST_F(Membership, AGroupWhoseEngineIsSilentDoesNotStartForEver) {
  for (const std::uint32_t timeout_ms : {500u, 20'000u}) {
    const std::uint64_t id = timeout_ms == 500 ? 1 : 2;
    for (const std::uint32_t rank : {0u, 1u}) {
      JoinRequest joins = request(rank, 2);
      joins.join.timeout_ms = timeout_ms;
      join(joins);
    }
    take();
    ready(0, id);
    // The limits' engine_ack_ms, if nobody is willing to wait for longer.
    clock_.advance_ms(timeout_ms == 500 ? 2'999 : 19'999);
    tick();
    for (const std::string& line : take()) EXPECT_EQ(line.find("refused"), std::string::npos) << line;
    clock_.advance_ms(1);
    EXPECT_LE(registry_.next_due_ns(), clock_.now_ns());
    tick();
    const Lines lines = take();
    EXPECT_EQ(
        std::count(lines.begin(), lines.end(), "refused session=10 request=100 status=DEADLINE_EXCEEDED"), 1);
    EXPECT_EQ(
        std::count(lines.begin(), lines.end(), "refused session=11 request=101 status=DEADLINE_EXCEEDED"), 1);
    EXPECT_NE(refusal_.message().find("ranks 1"), std::string::npos) << refusal_.message();
    removed(0, id);
    removed(1, id);
    EXPECT_FALSE(known(id));
    EXPECT_TRUE(memory_.held.empty());
  }
}

TEST_F(Membership, WhenAllDieTheGroupIsRemoved) {
  activate(2);
  session_closed(10, "died");
  session_closed(11, "died");
  stopped(0, 4);
  stopped(1, 4);
  take();
  broken(0, 4);
  broken(1, 4);
  EXPECT_EQ(take(), (Lines{"remove device=0 group=1", "remove device=1 group=1"}));
  removed(0);
  removed(1);
  EXPECT_FALSE(known());
  EXPECT_TRUE(memory_.held.empty());
}

// ---- recoverable breaks

TEST_F(Membership, ABreakRequestEndsInANewEpochFromTheLowestUncompletedOperation) {
  activate(2);
  request_break(1);
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=0 cause=DEADLINE_EXCEEDED failed_rank=1",
                           "break device=1 group=1 epoch=1 fatal=0 cause=DEADLINE_EXCEEDED failed_rank=1"}));
  EXPECT_EQ(break_text_, "rank 1 did not come");
  request_break(0);  // a second one for the same epoch
  broken(0, 12);
  EXPECT_TRUE(take().empty());
  broken(1, 10);
  EXPECT_EQ(take(),
            (Lines{"resume device=0 group=1 epoch=2 index=10", "resume device=1 group=1 epoch=2 index=10"}));
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
}

TEST_F(Membership, RequestsAndAnswersOfOlderEpochsAreIgnored) {
  activate(2);
  request_break(1);
  broken(0, 1);
  broken(1, 1);
  take();
  request_break(0, 1);
  EXPECT_TRUE(take().empty());
  request_break(0, 2);
  EXPECT_EQ(take().size(), 2u);
  broken(0, 5, 1);
  broken(1, 5, 1);
  EXPECT_EQ(group().phase(), GroupPhase::kBreaking);
}

// Tags have space for so many; with the next they would fall back, and no operation would ever end.
TEST_F(Membership, AGroupThatHasHadItsLastEpochIsLost) {
  activate(2);
  for (std::uint64_t epoch = 1; epoch < kLastEpoch; ++epoch) {
    request_break(1, epoch);
    broken(0, 1, epoch);
    broken(1, 1, epoch);
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
    take();
  }
  ASSERT_EQ(group().epoch, kLastEpoch);
  request_break(1, kLastEpoch);
  take();
  broken(0, 1, kLastEpoch);
  broken(1, 1, kLastEpoch);
  EXPECT_EQ(take(),
            (Lines{"break device=0 group=1 epoch=100 fatal=1 cause=ABORTED failed_rank=-1 fail_from=0",
                   "break device=1 group=1 epoch=100 fatal=1 cause=ABORTED failed_rank=-1 fail_from=0"}));
  EXPECT_NE(break_text_.find("epoch 100 is the last"), std::string::npos) << break_text_;
  broken(0, 1, kLastEpoch);
  broken(1, 1, kLastEpoch);
  EXPECT_EQ(group().phase(), GroupPhase::kLost);
}

TEST_F(Membership, ARankLostInARecoverableBreakTurnsItFatal) {
  activate(2);
  request_break(0);
  take();
  session_closed(11, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=1"}));
  stopped(1, 6);
  broken(0, 4);
  EXPECT_TRUE(take().empty()) << "each kBroken answers one kBreak";
  broken(1, 4);
  EXPECT_EQ(take_breaks(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=6",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=6"}));
  broken(0, 6);
  broken(1, 6);
  EXPECT_EQ(group().phase(), GroupPhase::kLost);
}

TEST_F(Membership, ABreakRequestInAFatalBreakFailsEverything) {
  activate(2);
  session_closed(11, "died");
  stopped(1, 6);
  take();
  request_break(0);
  EXPECT_EQ(take(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=0",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=0"}));
}

}  // namespace
}  // namespace epd::membership
