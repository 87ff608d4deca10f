// Groups that continue without a lost rank, and take it back.
#include "membership_fixture.h"

namespace epd::membership {
namespace {

class Degrade : public Membership {
 protected:
  explicit Degrade(std::uint32_t devices = 3) : Membership(devices) { policy_ = LossPolicy::kDegrade; }

  // Ranks 0, 1, 2 on devices 0, 1, 2; rank `lost` has died, the others are active in epoch 2.
  void activate_without(std::uint32_t lost, std::uint64_t next = 7) {
    activate(3);
    session_closed(10 + lost, "died");
    stopped(lost, next);
    for (std::uint32_t d = 0; d < 3; ++d) broken(d, d == lost ? ~std::uint64_t{0} : next);
    removed(lost);
    take();
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
    ASSERT_EQ(group().epoch, 2u);
    ASSERT_EQ(group().members.count(lost), 0u);
  }
  // A new process for a rank.
  JoinRequest newcomer(std::int32_t rank, std::uint64_t session, std::uint32_t device) const {
    JoinRequest r = request(0, 3);
    r.id.session.number = session;
    r.id.number = 100;
    r.engine.device = device;
    r.join.rank = rank;
    return r;
  }
};

TEST_F(Degrade, ALostRankIsMaskedAndTheOthersGoOnWithoutRedoingWhatItHadNotDone) {
  activate(3);
  session_closed(12, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=2 group=1 rank=2",
                           "break device=0 group=1 epoch=1 fatal=0 cause=RANK_LOST failed_rank=2",
                           "break device=1 group=1 epoch=1 fatal=0 cause=RANK_LOST failed_rank=2",
                           "break device=2 group=1 epoch=1 fatal=0 cause=RANK_LOST failed_rank=2"}));
  EXPECT_EQ(break_text_, "rank 2 (session 12, pid 1002) died");
  stopped(2, 5);
  broken(0, 7);
  broken(1, 6);
  EXPECT_EQ(memory_.held.count({1, 2}), 1u) << "its engine may still touch it";
  EXPECT_TRUE(take().empty());
  broken(2, ~std::uint64_t{0});
  EXPECT_EQ(take(), (Lines{"rank device=0 group=1 rank=2 since=0", "rank device=1 group=1 rank=2 since=0",
                           "remove device=2 group=1", "resume device=0 group=1 epoch=2 index=6",
                           "resume device=1 group=1 epoch=2 index=6"}));
  EXPECT_EQ(memory_.held.count({1, 2}), 0u);
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  removed(2);
  EXPECT_EQ(group().engines.size(), 2u);
  EXPECT_EQ(registry_.next_due_ns(), std::numeric_limits<std::uint64_t>::max());
}

TEST_F(Degrade, AnEvictedRankIsMaskedAndTheOthersGoOn) {
  activate(3);
  evict(1, 1, "was evicted by operator");
  stopped(1, 7);
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, d == 1 ? ~std::uint64_t{0} : 7);
  removed(1);
  take();
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(group().members.count(1), 0u);
  EXPECT_EQ(group().reason.text, "rank 1 (session 11, pid 1001) was evicted by operator");
  EXPECT_EQ(memory_.lost[1], "rank 1 was evicted by operator") << "its client lives";
  EXPECT_TRUE(memory_.to_close.empty()) << "its engine has closed its streams";
}

// No engine will ever hear of it, and its client may sleep in a stream.
TEST_F(Degrade, ARankThatIsEvictedWithoutItsEngineHasItsStreamsClosedByTheNext) {
  for (const auto kind : {abi::DeviceKind::kHost, abi::DeviceKind::kCuda}) {
    SCOPED_TRACE(kind == abi::DeviceKind::kHost ? "without streams" : "with streams");
    const std::uint64_t id = registry_.groups().empty() ? 1 : 2;
    kind_ = kind;
    for (std::uint32_t r = 0; r < 3; ++r) join(request(r, 3, id == 1 ? "host" : "cuda"));
    for (std::uint32_t d = 0; d < 3; ++d) ready(d, id);
    engine_down(1, "died");
    for (const std::uint32_t d : {0u, 2u}) say(d, abi::Broken{id, 1, 3});
    take();
    evict(id, 1, "was evicted by operator");
    EXPECT_EQ(memory_.held.count({id, 1}), 0u);
    EXPECT_EQ(memory_.lost[1], "rank 1 was evicted by operator");
    const Lines told = take();
    EXPECT_EQ(std::count(told.begin(), told.end(), "wake session=11"), 1);
    const bool streams = kind == abi::DeviceKind::kCuda;
    EXPECT_EQ(memory_.to_close.contains({1, 1}), streams);
    engine_up(1);
    memory_.lost.clear();
  }
}

TEST_F(Degrade, ARankThatMissesADeadlineStaysUnlessThePolicySaysOtherwise) {
  activate(3);
  request_break(0);
  EXPECT_EQ(take_breaks().size(), 3u);
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, 7);
  EXPECT_EQ(group().members.count(1), 1u);
}

TEST_F(Degrade, ARankThatMissesADeadlineIsLostWhereThePolicySaysSo) {
  policy_ = LossPolicy::kDegradeLate;
  activate(3);
  request_break(0);
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=1",
                           "break device=0 group=1 epoch=1 fatal=0 cause=RANK_LOST failed_rank=1",
                           "break device=1 group=1 epoch=1 fatal=0 cause=RANK_LOST failed_rank=1",
                           "break device=2 group=1 epoch=1 fatal=0 cause=RANK_LOST failed_rank=1"}));
  request_break(2);  // has waited for the same rank
  stopped(1, 7);
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, d == 1 ? ~std::uint64_t{0} : 7);
  removed(1);
  take();
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(group().members.count(1), 0u);
  EXPECT_EQ(memory_.lost[1], "rank 1 is late, and so lost: rank 1 did not come") << "its client lives";
  // The engine of the lost rank says the same of the epoch that is over.
  request_break(0);
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
}

TEST_F(Degrade, WhatBreaksForAnotherReasonLosesNoRank) {
  policy_ = LossPolicy::kDegradeLate;
  activate(3);
  abi::Break wanted{};
  wanted.group_id = 1;
  wanted.epoch = 1;
  for (const auto& [cause, rank] : {std::pair{StatusCode::kInvalidArgument, 1},
                                    {StatusCode::kDeadlineExceeded, -1},
                                    {StatusCode::kDeadlineExceeded, 3},
                                    {StatusCode::kDeadlineExceeded, -7}}) {
    wanted.cause = cause;
    wanted.failed_rank = rank;
    say(0, wanted);
    EXPECT_EQ(take_breaks().size(), 3u);
    for (std::uint32_t d = 0; d < 3; ++d) broken(d, 7, wanted.epoch);
    take();
    EXPECT_EQ(group().members.size(), 3u);
    ++wanted.epoch;
  }
}

TEST_F(Degrade, AnEvictedRankThatRejoinsIsRefusedOnce) {
  activate_without(1);
  join(newcomer(1, 77, 1));
  take();
  ASSERT_EQ(group().members.at(1).presence, Presence::kJoining);
  evict(1, 1, "was evicted by operator");
  std::size_t refused = 0;
  for (const std::string& line : take()) refused += line.starts_with("refused") ? 1 : 0;
  EXPECT_EQ(refused, 1u);
  EXPECT_EQ(refusal_.code(), StatusCode::kAborted);
}

TEST_F(Degrade, LeavingIsALossThatIsAnswered) {
  activate(3);
  leave(11, 500, members_.at(11));
  take();
  stopped(1, 3);
  EXPECT_EQ(take(), (Lines{"left session=11 request=500"}));
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, 3);
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(registry_.memberships({kLocalNode, 11}), 0u);
}

TEST_F(Degrade, ALeaveWhoseStopIsStillOnItsWayIsAnsweredWhenTheGroupGoesOn) {
  activate(3);
  request_break(0);
  broken(0, 3);
  broken(1, 3);
  take();
  leave(11, 500, members_.at(11));  // its engine has broken already
  broken(2, 3);
  const Lines lines = take();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "left session=11 request=500"), 1);
  stopped(1, 3);
  EXPECT_TRUE(take().empty());
}

TEST_F(Degrade, ARankLostInABreakIsMaskedByItAndGivesItsCause) {
  activate(3);
  request_break(0);
  take();
  broken(0, 4);
  session_closed(11, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=1"}));
  broken(1, ~std::uint64_t{0});
  broken(2, 4);
  EXPECT_EQ(take(), (Lines{"rank device=0 group=1 rank=1 since=0", "remove device=1 group=1",
                           "rank device=2 group=1 rank=1 since=0",
                           "resume device=0 group=1 epoch=2 index=4 cause=RANK_LOST",
                           "resume device=2 group=1 epoch=2 index=4 cause=RANK_LOST"}));
}

TEST_F(Degrade, SeveralRanksAreLostAtOnce) {
  activate(3);
  session_closed(10, "died");
  session_closed(12, "died");
  take();
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, d == 1 ? 9 : ~std::uint64_t{0});
  EXPECT_EQ(take(), (Lines{"remove device=0 group=1", "rank device=1 group=1 rank=0 since=0",
                           "rank device=1 group=1 rank=2 since=0", "remove device=2 group=1",
                           "resume device=1 group=1 epoch=2 index=9"}));
}

TEST_F(Degrade, WhenAllAreLostTheGroupEndsAndItsNameIsFree) {
  activate(3);
  for (std::uint64_t session : {10, 11, 12}) session_closed(session, "died");
  take();
  for (std::uint32_t r = 0; r < 3; ++r) stopped(r, 0);
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, 0);  // the recoverable one
  EXPECT_EQ(take_breaks().size(), 3u) << "now the fatal one";
  join(request(0, 3));
  EXPECT_EQ(registry_.groups().size(), 2u) << "the next group of that name forms";
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, 0);
  for (std::uint32_t d = 0; d < 3; ++d) removed(d);
  EXPECT_FALSE(known());
  EXPECT_EQ(memory_.held.size(), 1u);
}

TEST_F(Degrade, ARankRejoinsInABreakOfItsOwnAndIsAnsweredWhenItsEngineGoesOn) {
  activate_without(2);
  join(newcomer(-1, 77, 2));
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2",
                           "break device=1 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2",
                           "start device=2 group=1 broken=1"}));
  EXPECT_EQ(break_text_, "rank 2 has rejoined");
  broken(0, 12, 2);
  ready(2);
  EXPECT_TRUE(take().empty());
  broken(1, 11, 2);
  EXPECT_EQ(take(),
            (Lines{"rank device=0 group=1 rank=2 since=3", "rank device=1 group=1 rank=2 since=3",
                   "rank device=2 group=1 rank=2 since=3", "member device=2 group=1 rank=2",
                   "resume device=0 group=1 epoch=3 index=11", "resume device=1 group=1 epoch=3 index=11",
                   "resume device=2 group=1 epoch=3 index=11 cause=ABORTED"}))
      << "its board, which is new, has no say in the index";
  resumed(0, 3);
  EXPECT_TRUE(take().empty());
  resumed(2, 3);
  EXPECT_EQ(take(), (Lines{"joined session=77 request=100 rank=2"}));
  EXPECT_EQ(group().members.at(2).first_index, 11u);
  EXPECT_EQ(registry_.next_due_ns(), std::numeric_limits<std::uint64_t>::max());
}

TEST_F(Degrade, AJoinerWhoseEngineIsDownDisturbsNobodyUntilItIsBack) {
  activate_without(2);
  engine_down(2, "the engine of device 2 ended");
  take();
  join(newcomer(2, 77, 2));
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  engine_up(2);
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2",
                           "break device=1 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2",
                           "start device=2 group=1 broken=1"}));
}

TEST_F(Degrade, ARankRejoinsOnADeviceThatServesTheGroupAlready) {
  activate_without(2);
  join(newcomer(2, 77, 0));
  EXPECT_EQ(take().size(), 2u);
  broken(0, 5, 2);
  broken(1, 5, 2);
  EXPECT_EQ(take(), (Lines{"rank device=0 group=1 rank=2 since=3", "rank device=1 group=1 rank=2 since=3",
                           "member device=0 group=1 rank=2", "resume device=0 group=1 epoch=3 index=5",
                           "resume device=1 group=1 epoch=3 index=5"}));
  resumed(0, 3);
  EXPECT_EQ(take(), (Lines{"joined session=77 request=100 rank=2"}));
}

TEST_F(Degrade, OnlyAFreeRankCanBeRejoinedAndOnlyInTheSameShape) {
  activate_without(2);
  join(newcomer(1, 77, 2));
  EXPECT_EQ(take(), (Lines{"refused session=77 request=100 status=INVALID_ARGUMENT"}));
  EXPECT_NE(refusal_.message().find("free: 2"), std::string::npos) << refusal_.message();
  JoinRequest other = newcomer(2, 77, 2);
  other.join.shape.hidden = 256;
  join(other);
  EXPECT_EQ(take(), (Lines{"refused session=77 request=100 status=INVALID_ARGUMENT"}));
  memory_.limit = memory_.held.size();
  join(newcomer(2, 77, 2));
  EXPECT_EQ(take(), (Lines{"refused session=77 request=100 status=RESOURCE_EXHAUSTED"}));
  EXPECT_EQ(group().phase(), GroupPhase::kActive) << "nobody was disturbed";
}

TEST_F(Degrade, AJoinDuringABreakComesInTheNextOne) {
  activate(3);
  session_closed(12, "died");
  join(newcomer(2, 77, 2));
  stopped(2, 0);
  broken(0, 1);
  broken(1, 1);
  take();
  broken(2, ~std::uint64_t{0});
  const Lines lines = take();
  EXPECT_EQ(lines.back(), "break device=1 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2");
  EXPECT_EQ(engine_phase(2), EnginePhase::kRemoving) << "it must forget the old rank first";
  broken(0, 1, 2);
  broken(1, 1, 2);
  EXPECT_TRUE(take().empty());
  removed(2);
  EXPECT_EQ(take(), (Lines{"start device=2 group=1 broken=1"}));
  ready(2);
  resumed(2, 3);
  EXPECT_EQ(take().back(), "joined session=77 request=100 rank=2");
}

TEST_F(Degrade, AJoinerThatDiesBeforeItIsInIsSimplyMaskedAgain) {
  activate_without(2);
  join(newcomer(2, 77, 2));
  take();
  session_closed(77, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=2 group=1 rank=2"})) << "that engine has been told of it";
  broken(0, 5, 2);
  broken(1, 5, 2);
  ready(2);
  EXPECT_EQ(take(), (Lines{"rank device=0 group=1 rank=2 since=0", "rank device=1 group=1 rank=2 since=0",
                           "remove device=2 group=1", "resume device=0 group=1 epoch=3 index=5",
                           "resume device=1 group=1 epoch=3 index=5"}));
  removed(2);
  EXPECT_EQ(memory_.held.size(), 2u);
}

abi::RankRefused refusal_of(std::uint32_t rank) {
  abi::RankRefused message{1, rank, StatusCode::kInvalidArgument, {}};
  abi::set_text(message.text, "the memory is none", 18);
  return message;
}

TEST_F(Degrade, AJoinerWhoseMemoryItsEngineCantUseIsRefusedAndMasked) {
  activate_without(2);
  join(newcomer(2, 77, 2));
  take();
  say(2, refusal_of(2));
  EXPECT_EQ(take(), (Lines{"refused session=77 request=100 status=INVALID_ARGUMENT",
                           "stop_member device=2 group=1 rank=2"}));
  EXPECT_EQ(refusal_.message(), "rank 2: the memory is none");
  broken(0, 5, 2);
  broken(1, 5, 2);
  stopped(2, 5);
  ready(2);
  EXPECT_EQ(take(), (Lines{"rank device=0 group=1 rank=2 since=0", "rank device=1 group=1 rank=2 since=0",
                           "remove device=2 group=1", "resume device=0 group=1 epoch=3 index=5",
                           "resume device=1 group=1 epoch=3 index=5"}));
  EXPECT_EQ(memory_.held.size(), 2u);
}

// It lives, so it has to hear that it is out.
TEST_F(Degrade, ARankThatCantBeServedIsPutOut) {
  activate(3);
  say(1, refusal_of(1));
  EXPECT_EQ(group().members.at(1).evicted, "rank 1 can't be served: the memory is none");
  take();
  broken(0, 5);
  broken(1, 5);
  broken(2, 5);
  stopped(1, 5);
  EXPECT_EQ(group().epoch, 2u);
  EXPECT_EQ(memory_.lost.at(1), "rank 1 can't be served: the memory is none");
}

// Five failed starts of rank 2's engine, while the others wait.
class FailedStarts : public Degrade {
 protected:
  void SetUp() override {
    activate(3);
    for (int i = 0; i < 6; ++i) {
      engine_down(2, "died");
      engine_up(2);
    }
    broken(0, 5);
    broken(1, 5);
    take();
    ASSERT_EQ(group().phase(), GroupPhase::kBreaking);
  }
};

TEST_F(FailedStarts, TheRanksOfAnEngineThatCantStartTheGroupAreLost) {
  engine_down(2, "died");
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(group().epoch, 2u);
  EXPECT_EQ(group().members.count(2), 0u);
  EXPECT_EQ(group().engines.size(), 2u);
  EXPECT_NE(memory_.lost.at(2).find("went down 6 times while it started group"), std::string::npos)
      << memory_.lost.at(2);
}

TEST_F(FailedStarts, AnEngineThatNoRankNeedsIsNotWaitedFor) {
  session_closed(12, "died");
  ASSERT_EQ(group().phase(), GroupPhase::kBreaking);
  engine_down(2, "died");
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(group().epoch, 2u);
  EXPECT_EQ(group().engines.size(), 2u);
}

TEST_F(FailedStarts, AnEngineThatIsReadyBeginsAnew) {
  ready(2);
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  engine_down(2, "died");
  engine_up(2);
  engine_down(2, "died");
  engine_up(2);
  EXPECT_EQ(group().members.count(2), 1u);
}

// A peer's engine is told of the newcomer only when all have broken; kResume is on its way by then.
TEST_F(Degrade, AJoinerWhoseMemoryAPeersEngineCantUseCostsOneMoreBreak) {
  activate_without(2);
  join(newcomer(2, 77, 2));
  broken(0, 5, 2);
  broken(1, 5, 2);
  ready(2);
  take();
  say(1, refusal_of(2));
  EXPECT_EQ(take(), (Lines{"refused session=77 request=100 status=INVALID_ARGUMENT",
                           "stop_member device=2 group=1 rank=2",
                           "break device=0 group=1 epoch=3 fatal=0 cause=RANK_LOST failed_rank=2",
                           "break device=1 group=1 epoch=3 fatal=0 cause=RANK_LOST failed_rank=2",
                           "break device=2 group=1 epoch=3 fatal=0 cause=RANK_LOST failed_rank=2"}));
  for (std::uint32_t device = 0; device < 3; ++device) resumed(device, 3);
  EXPECT_TRUE(take().empty()) << "it has been answered";
  say(0, refusal_of(2));
  EXPECT_TRUE(take().empty()) << "once";
}

TEST_F(Degrade, AJoinerThatDiesAfterTheGroupWentOnIsLostLikeAnyRank) {
  activate_without(2);
  join(newcomer(2, 77, 2));
  broken(0, 5, 2);
  broken(1, 5, 2);
  ready(2);
  take();
  session_closed(77, "died");
  EXPECT_EQ(take().front(), "stop_member device=2 group=1 rank=2");
  EXPECT_EQ(group().phase(), GroupPhase::kBreaking);
  resumed(2, 3);
  EXPECT_TRUE(take().empty());
}

TEST_F(Degrade, AJoinerWhoseTimeRunsOutIsRefused) {
  activate_without(2);
  JoinRequest impatient = newcomer(2, 77, 2);
  impatient.join.timeout_ms = 500;
  join(impatient);
  JoinRequest late = newcomer(-1, 78, 2);
  late.join.timeout_ms = 400;
  join(late);
  EXPECT_EQ(take().back(), "refused session=78 request=100 status=INVALID_ARGUMENT") << "no rank is free";
  clock_.advance_ms(500);
  tick();
  EXPECT_EQ(take().front(), "refused session=77 request=100 status=DEADLINE_EXCEEDED");
  broken(0, 5, 2);
  broken(1, 5, 2);
  ready(2);
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(group().members.size(), 2u);
}

TEST_F(Degrade, AWaitingJoinerIsRefusedInTimeOrForgottenWithItsSession) {
  activate(3);
  session_closed(12, "died");
  JoinRequest impatient = newcomer(2, 77, 2);
  impatient.join.timeout_ms = 500;
  join(impatient);
  join(newcomer(2, 78, 2));
  session_closed(78, "died");
  take();
  clock_.advance_ms(500);
  tick();
  EXPECT_EQ(take(), (Lines{"refused session=77 request=100 status=DEADLINE_EXCEEDED"}));
  EXPECT_TRUE(group().waiting.empty());
}

TEST_F(Degrade, AWaitingJoinerFormsTheNextGroupIfThisOneEnds) {
  activate(3);
  session_closed(12, "died");
  join(newcomer(2, 77, 2));
  session_closed(10, "died");
  session_closed(11, "died");
  ASSERT_TRUE(known(2));
  EXPECT_EQ(group(2).phase(), GroupPhase::kForming);
  EXPECT_EQ(group(2).members.at(2).session.number, 77u);
}

TEST_F(Degrade, AJoinerIsAllThatIsLeft) {
  activate_without(2);
  join(newcomer(2, 77, 2));
  take();
  session_closed(10, "died");
  session_closed(11, "died");
  broken(0, ~std::uint64_t{0}, 2);
  broken(1, ~std::uint64_t{0}, 2);
  ready(2);
  resumed(2, 3);
  EXPECT_EQ(take().back(), "joined session=77 request=100 rank=2");
  EXPECT_EQ(group().resume_index, 7u) << "where the group stood";
}

TEST_F(Degrade, AnEngineThatRestartsIsToldWhoIsMasked) {
  activate_without(2);
  engine_down(1, "died");
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=2 fatal=0 cause=ENGINE_RESTARTED failed_rank=1"}));
  memory_.board_index[{1, 1}] = 8;
  broken(0, 9, 2);
  engine_up(1);
  ready(1);
  EXPECT_EQ(take(), (Lines{"start device=1 group=1 broken=1", "resume device=0 group=1 epoch=3 index=8",
                           "resume device=1 group=1 epoch=3 index=8 cause=ENGINE_RESTARTED"}));
}

TEST_F(Degrade, ARankThatIsLostWithItsEngineDoesNotHoldTheOthersUp) {
  activate(3);
  engine_down(1, "died");
  broken(0, 3);
  broken(2, 3);
  take();
  leave(11, 500, members_.at(11));  // its device may never come back
  EXPECT_EQ(take(), (Lines{"left session=11 request=500", "rank device=0 group=1 rank=1 since=0",
                           "rank device=2 group=1 rank=1 since=0",
                           "resume device=0 group=1 epoch=2 index=3 cause=RANK_LOST",
                           "resume device=2 group=1 epoch=2 index=3 cause=RANK_LOST"}));
  engine_up(1);
  EXPECT_TRUE(take().empty());
}

TEST_F(Degrade, AnEngineThatDiesAsItForgetsDisturbsNobody) {
  activate(3);
  session_closed(12, "died");
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, 1);
  take();
  engine_down(2, "died");
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(group().engines.count({kLocalNode, 2}), 0u);
}

TEST_F(Degrade, AJoinersEngineThatDiesBeforeItAnsweredAnswersLater) {
  activate_without(2);
  join(newcomer(2, 77, 2));
  broken(0, 5, 2);
  broken(1, 5, 2);
  ready(2);
  take();
  engine_down(2, "died");
  broken(0, 5, 3);
  broken(1, 5, 3);
  engine_up(2);
  take();
  ready(2);
  EXPECT_EQ(take().front(), "resume device=0 group=1 epoch=4 index=5") << "not from its own new board";
  resumed(2, 4);
  EXPECT_EQ(take(), (Lines{"joined session=77 request=100 rank=2"}));
}

TEST_F(Degrade, ARankIsWaitedForOnceByEachSession) {
  activate_without(2);
  engine_down(2, "died");  // so that they wait
  const auto ask = [&](std::int32_t rank, std::uint64_t session, std::uint32_t number) {
    JoinRequest r = newcomer(rank, session, 2);
    r.id.number = number;
    join(r);
    return take();
  };
  EXPECT_TRUE(ask(2, 77, 1).empty());
  EXPECT_EQ(ask(2, 77, 2), (Lines{"refused session=77 request=2 status=INVALID_ARGUMENT"}));
  EXPECT_EQ(refusal_.message(),
            "session 77 waits for rank 2 of group \"g\" already; allowed: to ask once for each of the 1 that "
            "are free");
  EXPECT_EQ(ask(-1, 77, 3), (Lines{"refused session=77 request=3 status=INVALID_ARGUMENT"}));
  EXPECT_TRUE(ask(-1, 78, 1).empty()) << "another session may";
  EXPECT_EQ(group().waiting.size(), 2u);
  session_closed(77, "died");
  EXPECT_EQ(group().waiting.size(), 1u);
}

TEST_F(Degrade, AJoinerWhoseEngineCannotServeItIsRefusedAndTheOthersGoOn) {
  activate_without(2);
  join(newcomer(2, 77, 2));
  take();
  say(2, abi::GroupReady{1, StatusCode::kInternal, "arena lost"});
  const Lines lines = take();
  EXPECT_EQ(lines.front(), "refused session=77 request=100 status=INTERNAL");
  EXPECT_FALSE(group().is(GroupPhase::kFailing));
}

TEST_F(Degrade, ARestartedEngineThatCannotServeTheGroupLosesItsRanks) {
  activate(3);
  engine_down(2, "died");
  engine_up(2);
  for (const std::uint32_t device : {0u, 1u}) broken(device, 5);
  take();
  say(2, abi::GroupReady{1, StatusCode::kInternal, "arena lost"});
  EXPECT_EQ(take(), (Lines{"stop_member device=2 group=1 rank=2", "rank device=0 group=1 rank=2 since=0",
                           "rank device=1 group=1 rank=2 since=0", "remove device=2 group=1",
                           "wake session=12", "resume device=0 group=1 epoch=2 index=5 cause=RANK_LOST",
                           "resume device=1 group=1 epoch=2 index=5 cause=RANK_LOST"}));
  EXPECT_EQ(group().reason.text, "rank 2 was lost: the engine can't serve the group: arena lost");
}

// ---- late ranks that come back

class LateRanks : public Degrade {
 protected:
  LateRanks() { policy_ = LossPolicy::kDegradeLate; }

  // Rank 1 has missed a deadline; the others are active in epoch 2.
  void activate_and_lose() {
    activate(3);
    request_break(0);
    stopped(1, 5);
    for (std::uint32_t d = 0; d < 3; ++d) broken(d, d == 1 ? ~std::uint64_t{0} : 7);
    removed(1);
    take();
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
    ASSERT_EQ(group().epoch, 2u);
    ASSERT_EQ(group().late.count(1), 1u);
  }
  JoinRequest asks(std::uint32_t rank, std::uint32_t number = 50) const {
    JoinRequest r = request(rank, 3);
    r.id.number = number + rank;
    r.join.restores = 1;
    return r;
  }
  // The answers that clients hear.
  Lines answers() {
    Lines lines = take();
    std::erase_if(lines, [](const std::string& line) {
      return line.rfind("joined", 0) != 0 && line.rfind("refused", 0) != 0;
    });
    return lines;
  }
};

TEST_F(LateRanks, ComeBackWhenAllThatLiveHaveAsked) {
  activate_and_lose();
  join(asks(0));
  join(asks(1));
  EXPECT_EQ(group().phase(), GroupPhase::kActive) << "rank 2 may still have to repeat something";
  join(asks(2));
  ASSERT_EQ(group().phase(), GroupPhase::kBreaking);
  EXPECT_EQ(answers(), (Lines{"joined session=10 request=50 rank=0", "joined session=12 request=52 rank=0"}))
      << "a break may take long, and nothing expires in it";
  EXPECT_EQ(joined_.epoch, 3u) << "for which they wait";
  clock_.advance_ms(60'000);
  tick();
  EXPECT_TRUE(answers().empty());
  broken(0, 9, 2);
  broken(2, 9, 2);
  ready(1);
  EXPECT_EQ(group().resume_index, 9u);
  join(asks(0, 60));
  EXPECT_EQ(answers(), (Lines{"joined session=10 request=60 rank=0"})) << "rank 1 is coming already";
  EXPECT_EQ(joined_.epoch, 3u);
  resumed(1, 3);
  EXPECT_EQ(answers(), (Lines{"joined session=11 request=51 rank=1"}));
  EXPECT_TRUE(group().late.empty());
  EXPECT_EQ(group().members.at(1).presence, Presence::kHere);
}

TEST_F(LateRanks, ComeBackAfterASecondLossToo) {
  activate_and_lose();
  for (std::uint32_t rank = 0; rank < 3; ++rank) join(asks(rank));
  broken(0, 9, 2);
  broken(2, 9, 2);
  ready(1);
  resumed(1, 3);
  take();
  request_break(0, 3);
  stopped(1, 12);
  for (std::uint32_t d = 0; d < 3; ++d) broken(d, d == 1 ? ~std::uint64_t{0} : 14, 3);
  removed(1);
  take();
  ASSERT_EQ(group().epoch, 4u);
  ASSERT_EQ(group().late.count(1), 1u);
  for (std::uint32_t rank = 0; rank < 3; ++rank) join(asks(rank, 60));
  broken(0, 15, 4);
  broken(2, 15, 4);
  ready(1);
  take();
  resumed(1, 5);
  EXPECT_EQ(answers(), (Lines{"joined session=11 request=61 rank=1"}));
  EXPECT_EQ(group().members.at(1).first_index, 15u);
}

// It waited until all others had asked, also for those who knew that nobody would come.
TEST_F(LateRanks, NobodyWaitsIfNoneIsLate) {
  activate(3);
  join(asks(0));
  EXPECT_EQ(answers(), (Lines{"joined session=10 request=50 rank=0"}));
  EXPECT_EQ(joined_.epoch, 1u);
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
}

TEST_F(LateRanks, ComeBackToTheGroupThatTheyNameOnly) {
  activate_and_lose();
  for (const std::uint32_t rank : {0u, 1u}) {
    JoinRequest r = asks(rank);
    abi::set_text(r.join.group, "h", 1);  // access was judged by it
    join(r);
    take();
    EXPECT_EQ(refusal_.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(refusal_.message(), "group is \"h\", and the group to come back to \"g\"; allowed: the same");
  }
  EXPECT_TRUE(group().asked.empty() && group().arrivals.empty());
}

TEST_F(LateRanks, ExpiryNamesWhoHasNotAsked) {
  activate_and_lose();
  join(asks(0));
  EXPECT_LE(registry_.next_due_ns(), clock_.now_ns() + 60'000'000'000u);
  clock_.advance_ms(60'000);
  tick();
  EXPECT_EQ(answers(), (Lines{"refused session=10 request=50 status=DEADLINE_EXCEEDED"}));
  EXPECT_EQ(refusal_.message(),
            "late ranks come back to group \"g\" when all ranks that live have asked for it; missing: 2, 1");
  EXPECT_EQ(group().epoch, 2u);
}

TEST_F(LateRanks, AreNotWaitedForWhenTheyAreGone) {
  activate_and_lose();
  join(asks(0));
  EXPECT_TRUE(answers().empty());
  leave(11, 7, members_.at(11));
  EXPECT_EQ(answers(),
            (Lines{"joined session=10 request=50 rank=0", "refused session=11 request=7 status=NOT_FOUND"}));
  EXPECT_EQ(group().epoch, 2u) << "nothing has to change";
}

TEST_F(LateRanks, ABreakEndsWhatWasAsked) {
  activate_and_lose();
  join(asks(0));
  join(asks(1));
  take();
  engine_down(2, "died");
  engine_up(2);
  EXPECT_EQ(answers(), (Lines{"refused session=10 request=50 status=ENGINE_RESTARTED"}))
      << "it may have to repeat what rank 2 has not completed";
  broken(0, 9, 2);
  ready(2);
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  join(asks(2));
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  join(asks(0, 60));
  EXPECT_EQ(group().phase(), GroupPhase::kBreaking);
}

TEST_F(LateRanks, NobodyElseComesBackSo) {
  activate_and_lose();
  JoinRequest stranger = asks(1);
  stranger.id.session.number = 99;
  JoinRequest of_another_user = asks(0);
  of_another_user.uid += 1;
  JoinRequest of_no_group = asks(0);
  of_no_group.join.restores = 77;
  for (const JoinRequest& r : {stranger, of_another_user, of_no_group}) {
    join(r);
    const Lines lines = answers();
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_NE(lines[0].find("RANK_LOST"), std::string::npos) << lines[0];
  }
  evict(1, 2, "was evicted by operator");
  stopped(2, 9);
  broken(0, 9, 2);
  broken(2, ~std::uint64_t{0}, 2);
  removed(2);
  take();
  join(asks(2));
  EXPECT_EQ(answers(), (Lines{"refused session=12 request=52 status=RANK_LOST"}));
}

TEST_F(LateRanks, AGroupThatEndsRefusesThoseThatWait) {
  activate_and_lose();
  join(asks(1));
  session_closed(10, "died");
  session_closed(12, "died");
  EXPECT_EQ(answers(), (Lines{"refused session=11 request=51 status=RANK_LOST"}));
}

}  // namespace
}  // namespace epd::membership
