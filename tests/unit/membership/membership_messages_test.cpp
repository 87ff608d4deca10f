// The registry by messages alone: memory that comes late, in another order, too late or not at all; what is
// told again.
#include "membership_messages.h"
#include "proto/shape_rules.h"

namespace epd::membership {
namespace {

// ---- memory

TEST_F(ByMessages, AJoinerCountsWhenItsMemoryHasCome) {
  const JoinRequest first = join_of(0, 2);
  const JoinRequest second = join_of(1, 2);
  EXPECT_EQ(tell(first), (Lines{"acquire device=0 group=1 rank=0 session=10"}));
  EXPECT_EQ(tell(second), (Lines{"acquire device=1 group=1 rank=1 session=11"}));
  EXPECT_TRUE(group().members.empty());
  EXPECT_EQ(registry_.memberships(second.id.session), 1u) << "it waits for one";
  EXPECT_EQ(tell(acquired(second, 1)), Lines{});
  EXPECT_EQ(group().phase(), GroupPhase::kForming);
  EXPECT_EQ(tell(acquired(first, 0)),
            (Lines{"start device=0 group=1 broken=0", "start device=1 group=1 broken=0"}));
}

TEST_F(ByMessages, ARankWhoseMemoryIsAskedForIsTaken) {
  tell(join_of(0, 2));
  JoinRequest other = join_of(0, 2);
  other.id.session.number = 77;
  EXPECT_EQ(tell(other), (Lines{"refused session=77 request=100 status=INVALID_ARGUMENT"}));
  EXPECT_EQ(refusal_.message(), "rank 0 of group \"g\" is taken by session 10 (pid 1000); free: 1");
  other.join.rank = -1;
  EXPECT_EQ(tell(other), (Lines{"acquire device=0 group=1 rank=1 session=77"}));
}

TEST_F(ByMessages, MemoryThatCantBeHadRefusesItsJoinerAlone) {
  const JoinRequest first = join_of(0, 2);
  const JoinRequest second = join_of(1, 2);
  tell(first);
  tell(second);
  tell(acquired(first, 0));
  EXPECT_EQ(tell(acquired(second, 1, 1, StatusCode::kResourceExhausted)),
            (Lines{"refused session=11 request=101 status=RESOURCE_EXHAUSTED"}));
  EXPECT_EQ(registry_.memberships(second.id.session), 0u);
  EXPECT_EQ(tell(second), (Lines{"acquire device=1 group=1 rank=1 session=11"})) << "the rank is free again";
  EXPECT_EQ(tell(acquired(second, 1)).size(), 2u) << "the group starts";
}

TEST_F(ByMessages, AFirstJoinerWithoutMemoryLeavesNoGroup) {
  const JoinRequest first = join_of(0, 2);
  tell(first);
  tell(acquired(first, 0, 1, StatusCode::kResourceExhausted));
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_EQ(tell(join_of(0, 3)), (Lines{"acquire device=0 group=2 rank=0 session=10"})) << "its name is free";
}

TEST_F(ByMessages, MemoryThatComesAfterItsSessionHasClosedIsGivenBackAndCountsForNobody) {
  const JoinRequest gone = join_of(1, 2);
  tell(join_of(0, 2));
  tell(gone);
  EXPECT_EQ(tell(SessionClosed{gone.id.session, "died"}), (Lines{"free device=1 group=1 rank=1"}));
  JoinRequest next = gone;
  next.id.session.number = 77;
  EXPECT_EQ(tell(next), (Lines{"acquire device=1 group=1 rank=1 session=77"}));
  EXPECT_EQ(tell(acquired(gone, 1)), Lines{}) << "it is not the next one's";
  EXPECT_EQ(tell(acquired(gone, 1, 1, StatusCode::kResourceExhausted)), Lines{});
  EXPECT_TRUE(group().members.empty());
  EXPECT_EQ(tell(acquired(next, 1)), Lines{});
  EXPECT_TRUE(group().lives(1));
}

TEST_F(ByMessages, AGroupWhoseOnlyJoinerDiesBeforeItsMemoryComesIsForgotten) {
  const JoinRequest first = join_of(0, 2);
  tell(first);
  EXPECT_EQ(tell(SessionClosed{first.id.session, "died"}), (Lines{"free device=0 group=1 rank=0"}));
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_EQ(tell(acquired(first, 0)), Lines{});
}

TEST_F(ByMessages, TheJoinDeadlineHoldsForThoseWhoseMemoryHasNotCome) {
  JoinRequest impatient = join_of(0, 2);
  impatient.join.timeout_ms = 500;
  tell(impatient);
  const JoinRequest other = join_of(1, 2);
  tell(other);
  tell(acquired(other, 1));
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 500'000'000);
  EXPECT_EQ(tick_after(500), (Lines{"refused session=11 request=101 status=DEADLINE_EXCEEDED",
                                    "refused session=10 request=100 status=DEADLINE_EXCEEDED",
                                    "free device=1 group=1 rank=1", "free device=0 group=1 rank=0"}));
  EXPECT_TRUE(registry_.groups().empty());
  for (const JoinRequest& join : {impatient, other}) EXPECT_EQ(registry_.memberships(join.id.session), 0u);
}

// Ranks 0 and 1 run in epoch 2; rank 2 is lost.
class DegradedByMessages : public ByMessages {
 protected:
  void SetUp() override {
    policy_ = LossPolicy::kDegrade;
    std::vector<JoinRequest> joins{join_of(0, 4), join_of(1, 4), join_of(2, 4), join_of(3, 4)};
    activate(joins);
    for (const std::uint32_t rank : {2u, 3u}) tell(SessionClosed{joins[rank].id.session, "died"});
    for (const std::uint32_t device : {0u, 1u}) tell(broken({kLocalNode, device}, 1, 7));
    ASSERT_EQ(group().epoch, 2u);
    ASSERT_EQ(group().num_lost(), 2u);
  }
  JoinRequest newcomer(std::uint32_t rank, std::uint64_t session) const {
    JoinRequest request = join_of(rank, 4);
    request.id.session.number = session;
    return request;
  }
};

TEST_F(DegradedByMessages, NobodyIsDisturbedBeforeTheMemoryOfAllWhoWaitHasCome) {
  const JoinRequest two = newcomer(2, 77);
  const JoinRequest three = newcomer(3, 78);
  EXPECT_EQ(tell(two), (Lines{"acquire device=0 group=1 rank=2 session=77"}));
  EXPECT_EQ(tell(three), (Lines{"acquire device=1 group=1 rank=3 session=78"}));
  EXPECT_EQ(tell(acquired(three, 3)), Lines{});
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(tell(acquired(two, 2)),
            (Lines{"break device=0 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2",
                   "break device=1 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2"}));
  EXPECT_EQ(group().reason.text, "ranks 2, 3 have rejoined");
}

TEST_F(DegradedByMessages, OneWhoseMemoryCantBeHadDoesNotKeepTheOthersOut) {
  const JoinRequest two = newcomer(2, 77);
  const JoinRequest three = newcomer(3, 78);
  tell(two);
  tell(three);
  tell(acquired(three, 3));
  EXPECT_EQ(tell(acquired(two, 2, 1, StatusCode::kResourceExhausted)),
            (Lines{"refused session=77 request=102 status=RESOURCE_EXHAUSTED",
                   "break device=0 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=3",
                   "break device=1 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=3"}));
}

TEST_F(DegradedByMessages, OneWhoDiesOrWaitsTooLongForItsMemoryDoesNotKeepTheOthersOut) {
  for (const bool dies : {true, false}) {
    SCOPED_TRACE(dies ? "dies" : "waits too long");
    JoinRequest two = newcomer(2, dies ? 77 : 87);
    two.join.timeout_ms = 500;
    JoinRequest three = newcomer(3, dies ? 78 : 88);
    tell(two);
    tell(three);
    tell(acquired(three, 3));
    const Lines lines = dies ? tell(SessionClosed{two.id.session, "died"}) : tick_after(500);
    EXPECT_EQ(
        std::count(lines.begin(), lines.end(), "refused session=87 request=102 status=DEADLINE_EXCEEDED"),
        dies ? 0 : 1);
    EXPECT_EQ(std::count(lines.begin(), lines.end(), "free device=0 group=1 rank=2"), 1);
    EXPECT_EQ(group().reason.text, "rank 3 has rejoined");
    ASSERT_EQ(group().phase(), GroupPhase::kBreaking);
    if (!dies) return;
    // Without rank 3 again.
    tell(SessionClosed{three.id.session, "died"});
    for (const std::uint32_t device : {0u, 1u}) tell(broken({kLocalNode, device}, 2, 7));
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
    ASSERT_EQ(group().num_lost(), 2u);
  }
}

TEST_F(DegradedByMessages, MemoryThatComesInABreakWaitsForItsEnd) {
  const JoinRequest two = newcomer(2, 77);
  tell(two);
  tell(break_asked({kLocalNode, 0}, 2));
  EXPECT_EQ(tell(acquired(two, 2)), Lines{});
  tell(broken({kLocalNode, 0}, 2, 9));
  const Lines lines = tell(broken({kLocalNode, 1}, 2, 9));
  EXPECT_EQ(lines.front(), "resume device=0 group=1 epoch=3 index=9");
  EXPECT_EQ(lines.back(), "break device=1 group=1 epoch=3 fatal=0 cause=ABORTED failed_rank=2");
}

TEST_F(DegradedByMessages, ARankWhoseEngineDiesWhileItsMemoryIsMadeWaitsForTheNextEngine) {
  // On an engine of its own that serves nobody yet.
  registry_.handle(NodeUp{7, {{"host:0", {}}}});
  registry_.handle(EngineUp{{7, 0}});
  JoinRequest two = newcomer(2, 77);
  two.id.session.node = 7;
  two.engine = {7, 0};
  EXPECT_EQ(tell(two), (Lines{"acquire device=0 group=1 rank=2 session=77 node=7"}));
  tell(EngineDown{{7, 0}, "died", {}});
  EXPECT_EQ(tell(acquired(two, 2)), Lines{}) << "nobody stops for it before it can be served";
  EXPECT_EQ(tell(EngineUp{{7, 0}}),
            (Lines{"break device=0 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2",
                   "break device=1 group=1 epoch=2 fatal=0 cause=ABORTED failed_rank=2",
                   "start device=0 group=1 broken=1 node=7"}));
}

TEST_F(DegradedByMessages, AGroupThatEndsLetsThoseWhoseMemoryIsMadeFormTheNextOne) {
  const JoinRequest two = newcomer(2, 77);
  tell(two);
  for (const std::uint64_t session : {10u, 11u}) tell(SessionClosed{{kLocalNode, session}, "died"});
  ASSERT_EQ(group().phase(), GroupPhase::kFailing);
  ASSERT_TRUE(registry_.groups().contains(2));
  EXPECT_EQ(tell(acquired(two, 2)), Lines{}) << "that of the old one has been given back";
  EXPECT_TRUE(group(2).members.empty());
  EXPECT_EQ(tell(acquired(two, 2, 2)), Lines{});
  EXPECT_TRUE(group(2).lives(2));
}

// ---- what is told again

TEST_F(ByMessages, AJoinThatWaitsIsTheSameWhenItIsSaidAgain) {
  const JoinRequest first = join_of(0, 2);
  tell(first);
  EXPECT_EQ(tell(first), Lines{}) << "its memory is asked for once";
  tell(acquired(first, 0));
  EXPECT_EQ(tell(first), Lines{}) << "it has its rank";
  EXPECT_EQ(tell(acquired(first, 0)), Lines{});
  const JoinRequest second = join_of(1, 2);
  tell(second);
  tell(acquired(second, 1));
  EXPECT_EQ(tell(first), Lines{}) << "the group starts";
  tell(ready(first.engine));
  EXPECT_EQ(tell(ready(second.engine)),
            (Lines{"joined session=10 request=100 rank=0", "joined session=11 request=101 rank=1"}));
  EXPECT_EQ(tell(first), (Lines{"refused session=10 request=100 status=INVALID_ARGUMENT"}))
      << "it has been answered: this is another one";
}

TEST_F(ByMessages, AJoinThatIsPutAsideIsTheSameWhenItIsSaidAgain) {
  MembershipLimits limits;
  limits.conflict_ms = 250;
  registry_.set_limits(limits);
  tell(join_of(0, 2));
  JoinRequest other = join_of(0, 2);
  other.id.session.number = 77;
  EXPECT_EQ(tell(other), Lines{});
  EXPECT_EQ(tell(other), Lines{});
  EXPECT_EQ(tick_after(251), (Lines{"refused session=77 request=100 status=INVALID_ARGUMENT"})) << "once";
}

TEST_F(ByMessages, ALeaveThatWaitsIsTheSameWhenItIsSaidAgain) {
  const std::vector<JoinRequest> joins{join_of(0, 2), join_of(1, 2)};
  activate(joins);
  const LeaveRequest leave{{joins[1].id.session, 500}, group().members.at(1).member};
  EXPECT_EQ(tell(leave), (Lines{"stop_member device=1 group=1 rank=1"}));
  EXPECT_EQ(tell(leave), Lines{});
  const Lines lines = tell(MemberStopped{joins[1].engine, {1, 1, 0, 3}});
  EXPECT_EQ(lines.front(), "left session=11 request=500");
  EXPECT_EQ(tell(leave), (Lines{"refused session=11 request=500 status=NOT_FOUND"}));
}

TEST_F(ByMessages, NobodyIsAnsweredWhoseSessionHasClosed) {
  const JoinRequest first = join_of(0, 2);
  tell(first);
  tell(acquired(first, 0));
  tell(SessionClosed{first.id.session, "died"});
  EXPECT_EQ(tick_after(60'000), Lines{});
}

// One message of each kind without its group, its rank, or a pending answer.
TEST_F(ByMessages, WhatNobodyWaitsForChangesNothing) {
  const std::vector<JoinRequest> joins{join_of(0, 2), join_of(1, 2)};
  activate(joins);
  const std::uint64_t due = registry_.next_due_ns();
  const EngineId engine = joins[0].engine;
  const EngineId stranger{kLocalNode, 9};
  for (const std::uint64_t id : {1u, 77u}) {
    for (const EngineId from : {engine, stranger}) {
      SCOPED_TRACE("group " + std::to_string(id) + ", device " + std::to_string(from.device));
      EXPECT_EQ(tell(ready(from, {{id, 0, 3}}, id)), Lines{});
      EXPECT_EQ(tell(GroupWaits{from, {id, {}}}), Lines{});
      EXPECT_EQ(tell(MemberStopped{from, {id, 0, 0, 0}}), Lines{});
      EXPECT_EQ(tell(Broken{from, {id, 1, 0}}), Lines{});
      EXPECT_EQ(tell(Resumed{from, {id, 1}}), Lines{});
      EXPECT_EQ(tell(GroupRemoved{from, {id}}), Lines{});
      EXPECT_EQ(tell(RankRefused{from, {id, 9, StatusCode::kInternal, {}}}), Lines{}) << "no such rank";
    }
    EXPECT_EQ(tell(EvictRank{id, 9, "was evicted"}), Lines{});
    EXPECT_EQ(tell(MemoryAcquired{joins[0].id, id, 0, {}}), Lines{});
    EXPECT_EQ(tell(MemoryAcquired{joins[0].id, id, 0, {StatusCode::kInternal, "late"}}), Lines{});
  }
  EXPECT_EQ(tell(break_asked(stranger, 1)), Lines{});
  EXPECT_EQ(tell(break_asked(engine, 9)), Lines{}) << "another epoch";
  EXPECT_EQ(tell(EngineUp{engine}), Lines{});
  EXPECT_EQ(tell(EngineDown{stranger, "died", {{1, 0, 5}, {77, 0, 5}}}), Lines{});
  EXPECT_EQ(tell(SessionClosed{{kLocalNode, 99}, "died"}), Lines{});
  EXPECT_EQ(tell(NodeDrains{kLocalNode, {StatusCode::kAborted, "draining"}}), Lines{});
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(registry_.next_due_ns(), due);
}

// ---- what is told is whole

TEST_F(ByMessages, AStartSaysAllThatItsEngineMustKnow) {
  JoinRequest first = join_of(0, 3);
  JoinRequest second = join_of(1, 3);
  JoinRequest third = join_of(2, 3);  // on device 0 too
  first.join.sms = 4;
  third.join.sms = 6;
  third.join.priority = 3;
  for (const JoinRequest& join : {first, second, third}) tell(join);
  tell(acquired(first, 0));
  tell(acquired(second, 1));
  tell(acquired(third, 2));
  ASSERT_EQ(actions_.size(), 2u);
  const auto& start = std::get<StartGroup>(actions_[0]);
  EXPECT_EQ(start.engine, (EngineId{kLocalNode, 0}));
  EXPECT_EQ(start.group.label.id, 1u);
  EXPECT_EQ(start.group.label.uid, kUid);
  EXPECT_EQ(start.group.label.name, "g");
  EXPECT_EQ(start.group.epoch, 1u);
  EXPECT_EQ(start.group.resume_index, 0u);
  abi::GroupShape shape = first.join.shape;
  shape.sum_ranks = 3;  // the default on one node
  EXPECT_EQ(abi::first_difference(start.group.shape, shape), nullptr);
  ASSERT_EQ(start.group.ranks.size(), 3u);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(start.group.ranks[rank].rank, rank);
    EXPECT_EQ(start.group.ranks[rank].engine, (EngineId{kLocalNode, rank % 2}));
    EXPECT_EQ(start.group.ranks[rank].active_since, 1u);
  }
  ASSERT_EQ(start.group.members.size(), 2u) << "its own";
  EXPECT_EQ(start.group.members[0].session, first.id.session);
  EXPECT_EQ(start.group.members[1].rank, 2u);
  EXPECT_EQ(start.group.members[1].member, group().members.at(2).member);
  EXPECT_EQ(start.group.settings.sms, 6u);
  EXPECT_EQ(start.group.settings.priority, 3);
}

}  // namespace
}  // namespace epd::membership
