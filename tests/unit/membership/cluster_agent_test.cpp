// An agent alone, by the messages between it and the coordinator.
#include "membership/agent.h"

#include "one_side.h"

#include <algorithm>

namespace epd::membership {
namespace {

class AgentAlone : public testing::Test {
 protected:
  static constexpr std::uint64_t kGroup = (std::uint64_t{1} << 63) | 7;

  AgentAlone() {
    agent_.handle(EngineUp{{kLocalNode, 0}, "address"});
    agent_.channel_began();
  }
  template <typename Body>
  void hear(const Body& body, std::uint64_t term = 4, std::uint32_t number = 3) {
    agent_.handle(ToAgent{term, number, body});
  }
  void welcome(const std::vector<std::uint64_t>& groups = {}, std::uint64_t term = 4,
               std::uint32_t number = 3) {
    hear(Welcome{last_attach().attempt, groups}, term, number);
  }
  void order(const Action& action, std::uint64_t heard = 1000) { hear(Order{heard, action}); }
  Attach last_attach() {
    collect();
    const auto found = std::find_if(said_.rbegin(), said_.rend(), [](const ToCoordinator& m) {
      return std::holds_alternative<Attach>(m.body);
    });
    return std::get<Attach>(found->body);
  }
  // The events that it has said since the last call.
  std::vector<Event> events() {
    collect();
    std::vector<Event> events;
    for (const ToCoordinator& message : std::exchange(said_, {})) {
      if (const auto* told = std::get_if<Told>(&message.body)) events.push_back(told->event);
    }
    return events;
  }
  std::vector<std::string> actions() {
    std::vector<std::string> lines;
    for (const Action& action : agent_.take_actions()) {
      std::string line = to_string(action);
      const auto at = line.find(std::to_string(kGroup));
      if (at != std::string::npos) line.replace(at, std::to_string(kGroup).size(), "G");
      lines.push_back(line);
      if (const auto* refused = std::get_if<ReplyRefused>(&action)) refusal_ = refused->status;
      if (const auto* sent = std::get_if<SendBreak>(&action)) break_text_ = sent->message.text;
    }
    return lines;
  }
  void after_ms(std::uint64_t ms) {
    clock_.advance_ms(ms);
    agent_.tick();
  }

  // Rank 0 of two is here, on number 3; the other one is on number 8.
  void serve() {
    const JoinRequest join = join_request(10, 0, 2);
    agent_.handle(join);
    const RequestId request{{3, 10}, 100};
    order(AcquireMemory{{3, 0}, request, kGroup, 0, kUid, join.join.shape});
    agent_.handle(MemoryAcquired{request, kGroup, 0, {}});
    StartGroup start{{3, 0}, {}, false};
    start.group.label = {kGroup, kUid, "g"};
    start.group.shape = join.join.shape;
    start.group.epoch = 1;
    start.group.view = 1;
    start.group.ranks = {{0, {3, 0}, 1}, {1, {8, 0}, 1}};
    start.group.far_engines = {{{8, 0}, "node-b", "address-b"}};
    start.group.members = {{0, {3, 10}, make_member_id(256, 1), 0}};
    order(start);
    agent_.handle(GroupReady{{kLocalNode, 0}, {kGroup, StatusCode::kOk, {}}, {}});
    ReplyJoined joined{request, {}, {}};
    joined.message.group_id = kGroup;
    order(joined);
    actions();
    events();
    ASSERT_EQ(agent_.groups().size(), 1u);
    ASSERT_TRUE(agent_.groups().at(kGroup).is_steady());
  }

  ManualClock clock_;
  Agent agent_{clock_, {kTimes, kLimits, NodeUp{kLocalNode, {{"host:0", {}}}, "a", "boot"}}};
  Status refusal_;
  std::string break_text_;
  using Lines = std::vector<std::string>;

 private:
  void collect() {
    for (ToCoordinator& message : agent_.take_messages()) said_.push_back(std::move(message));
  }
  std::vector<ToCoordinator> said_;
};

TEST_F(AgentAlone, KnowsSinceWhenItHasAGroup) {
  welcome();
  clock_.advance_ms(700);
  const std::uint64_t then = clock_.now_ns();
  serve();
  clock_.advance_ms(700);
  EXPECT_EQ(agent_.groups().at(kGroup).created_ns, then);
  EXPECT_EQ(agent_.groups().at(kGroup).created_ns, then);
}

TEST_F(AgentAlone, RequestsWaitForAWelcomeAndHaveTheRestOfTheirTime) {
  JoinRequest join = join_request(10, 0, 2);
  join.join.timeout_ms = 1'500;
  agent_.handle(join);
  EXPECT_TRUE(events().empty());
  agent_.channel_began();
  after_ms(1'000);
  welcome();
  const std::vector<Event> said = events();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(std::get<JoinRequest>(said[0]).join.timeout_ms, 500u);
}

class CountingClock final : public Clock {
 public:
  std::uint64_t now_ns() const override {
    ++looks;
    return 1'000'000'000;
  }
  mutable std::size_t looks = 0;
};

// The agent looked at all joins that waited for each that came, and again for each turn.
TEST(AgentOfMany, AJoinCostsTheSameHoweverManyWait) {
  const CountingClock clock;
  Agent agent(clock, {kTimes, kLimits, NodeUp{kLocalNode, {{"host:0", {}}}, "a", "boot"}});
  agent.channel_began();
  std::uint64_t session = 10;
  const auto cost_of_join = [&] {
    const std::size_t before = clock.looks;
    agent.handle(join_request(session++, 0, 2));
    (void)agent.take_actions();
    (void)agent.next_due_ns();
    return clock.looks - before;
  };
  const std::size_t first = cost_of_join();
  while (session < 1'000) cost_of_join();
  EXPECT_EQ(cost_of_join(), first);
  agent.handle(ToAgent{4, 3, Welcome{1, {}}});
  EXPECT_EQ(agent.take_messages().size(), 1u + (session - 10)) << "Attach, and what it is told of each";
  const std::size_t before = clock.looks;
  agent.tick();
  EXPECT_LT(clock.looks - before, 20u);
}

TEST_F(AgentAlone, AWelcomeForAnEarlierAttemptIsNone) {
  const std::uint64_t earlier = last_attach().attempt;
  agent_.channel_began();
  hear(Welcome{earlier, {}});
  EXPECT_FALSE(agent_.attached());
  welcome();
  EXPECT_TRUE(agent_.attached());
}

TEST_F(AgentAlone, WithoutACoordinatorAJoinIsRefusedAtItsDeadline) {
  JoinRequest join = join_request(10, 0, 2);
  join.join.timeout_ms = 1'500;
  agent_.handle(join);
  after_ms(1'499);
  EXPECT_EQ(actions(), Lines{});
  after_ms(1);
  EXPECT_EQ(actions(), (Lines{"refused session=10 request=100 status=DEADLINE_EXCEEDED"}));
  EXPECT_EQ(refusal_.message(), "node a has had no coordinator for 1.5 s");
}

TEST_F(AgentAlone, ObeysItsTermAndItsNumberAlone) {
  welcome();
  const Action action = AcquireMemory{{3, 0}, {{3, 10}, 100}, kGroup, 0, kUid, {}};
  hear(Order{0, action}, 3, 3);
  hear(Order{0, action}, 4, 2);
  EXPECT_EQ(actions(), Lines{});
  hear(Order{0, action}, 4, 3);
  EXPECT_EQ(actions().size(), 1u);
}

TEST_F(AgentAlone, SaysOfWhatIsOverThatItIs) {
  welcome();
  agent_.take_messages();
  hear(CoordinatorHeartbeat{}, 3);
  const std::vector<ToCoordinator> said = agent_.take_messages();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<Superseded>(said[0].body));
  EXPECT_EQ(said[0].term, 4u);
}

TEST_F(AgentAlone, WhatIsForTheEngineBeforeIsDropped) {
  welcome();
  serve();
  agent_.handle(EngineDown{{kLocalNode, 0}, "died", {}});
  agent_.handle(EngineUp{{kLocalNode, 0}, "new"});
  const std::uint64_t heard = 5;  // join, memory, ready, down, up
  order(SendRelease{{3, 0}, {kGroup}}, heard - 1);
  EXPECT_EQ(actions(), Lines{});
  order(SendRelease{{3, 0}, {kGroup}}, heard);
  EXPECT_EQ(actions().size(), 1u);
}

TEST_F(AgentAlone, GroupsThatNeedNoDecisionRunOnWithoutACoordinator) {
  welcome();
  serve();
  after_ms(60'000);
  EXPECT_EQ(actions(), Lines{});
  EXPECT_TRUE(agent_.cut_off());
  agent_.channel_began();
  const Attach attach = last_attach();
  ASSERT_EQ(attach.groups.size(), 1u);
  EXPECT_EQ(attach.number, 3u);
  EXPECT_EQ(attach.groups[0].ranks[0].session, 10u);
  EXPECT_TRUE(attach.groups[0].told.far_engines.empty()) << "their nodes say their addresses";
  welcome({kGroup}, 5);
  EXPECT_EQ(actions(), Lines{});
  EXPECT_TRUE(agent_.groups().contains(kGroup));
}

TEST_F(AgentAlone, GroupsThatNeedOneEndHereAfterAWhile) {
  welcome();
  serve();
  after_ms(1);
  BreakRequested wanted{{kLocalNode, 0}, {}};
  wanted.message.group_id = kGroup;
  wanted.message.epoch = 1;
  agent_.handle(wanted);
  after_ms(9'998);
  EXPECT_EQ(actions(), Lines{});
  after_ms(1);
  EXPECT_EQ(actions(),
            (Lines{"break device=0 group=G epoch=1 fatal=1 cause=RANK_LOST failed_rank=0 fail_from=0"}));
  EXPECT_EQ(break_text_, "rank 0 was lost: node a has had no coordinator for 10.0 s");
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 1, 3}});
  agent_.handle(LeaveRequest{{{kLocalNode, 10}, 101}, make_member_id(256, 1)});
  EXPECT_EQ(actions(), (Lines{"left session=10 request=101", "free device=0 group=G rank=0",
                              "remove device=0 group=G"}));
  agent_.handle(GroupRemoved{{kLocalNode, 0}, {kGroup}});
  EXPECT_TRUE(agent_.ended().empty());
  hear(CoordinatorHeartbeat{});
  EXPECT_TRUE(last_attach().groups.empty()) << "it has left them, and says so";
}

// The node is cut off: its engines reach no others, and no operation has missed its deadline yet.
TEST_F(AgentAlone, GroupsWhoseEnginesReachNoOthersEndHereAfterAWhile) {
  welcome();
  serve();
  const PeerLost lost{{kLocalNode, 0}, {8, 0}, "host:0 on node-b has said nothing for 2000 ms"};
  for (int i = 0; i < 4; ++i) {
    after_ms(2'000);
    agent_.handle(lost);
  }
  after_ms(1'999);
  EXPECT_EQ(actions(), Lines{});
  after_ms(1);
  EXPECT_EQ(actions(),
            (Lines{"break device=0 group=G epoch=1 fatal=1 cause=RANK_LOST failed_rank=0 fail_from=0"}));
  EXPECT_EQ(break_text_, "rank 0 was lost: node a has had no coordinator for 10.0 s");
}

// It says nothing any more of another group, or of one that works again.
TEST_F(AgentAlone, GroupsWhoseEnginesReachOthersAgainRunOn) {
  welcome();
  serve();
  after_ms(2'000);
  agent_.handle(PeerLost{{kLocalNode, 0}, {8, 0}, "silent"});
  after_ms(2'000);
  agent_.handle(PeerLost{{kLocalNode, 0}, {8, 0}, "silent"});
  after_ms(5'000);
  agent_.handle(PeerLost{{kLocalNode, 0}, {9, 0}, "an engine without a rank of the group"});
  after_ms(50'000);
  EXPECT_EQ(actions(), Lines{});
  EXPECT_TRUE(agent_.groups().contains(kGroup));
}

TEST_F(AgentAlone, ALeaveWithoutACoordinatorIsALeaveOfItsOwn) {
  welcome();
  serve();
  after_ms(3'000);
  agent_.handle(LeaveRequest{{{kLocalNode, 10}, 101}, make_member_id(256, 1)});
  agent_.handle(LeaveRequest{{{kLocalNode, 10}, 102}, make_member_id(256, 7)});
  after_ms(6'999);
  EXPECT_EQ(actions(), Lines{});
  EXPECT_EQ(agent_.next_due_ns(), clock_.now_ns() + 1'000'000);
  after_ms(1);
  EXPECT_EQ(
      actions(),
      (Lines{"break device=0 group=G epoch=1 fatal=1 cause=RANK_LOST failed_rank=0 fail_from=0",
             "stop_member device=0 group=G rank=0", "refused session=10 request=102 status=NOT_FOUND"}));
  agent_.handle(MemberStopped{{kLocalNode, 0}, {kGroup, 0, 0, 3}});
  EXPECT_EQ(actions(), (Lines{"left session=10 request=101"}));
}

TEST_F(AgentAlone, ALeaveWhileItIsApartIsAnsweredAtOnce) {
  welcome();
  serve();
  after_ms(20'000);
  EXPECT_EQ(actions(), Lines{});
  agent_.handle(LeaveRequest{{{kLocalNode, 10}, 101}, make_member_id(256, 1)});
  EXPECT_LE(agent_.next_due_ns(), clock_.now_ns());
  after_ms(0);
  EXPECT_EQ(actions().size(), 2u);
  agent_.handle(MemberStopped{{kLocalNode, 0}, {kGroup, 0, 0, 3}});
  EXPECT_EQ(actions(), (Lines{"left session=10 request=101"}));
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 1, 3}});
  agent_.handle(GroupRemoved{{kLocalNode, 0}, {kGroup}});
  EXPECT_TRUE(agent_.ended().empty());
  EXPECT_GT(agent_.next_due_ns(), clock_.now_ns());
}

TEST_F(AgentAlone, ARequestIsSaidBehindWhatHasMadeItPossible) {
  welcome();
  serve();
  hear(PutOut{"silent for 2000 ms"});
  welcome({}, 4, 9);
  agent_.handle(join_request(11, 0, 2));
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 1, 3}});
  agent_.handle(SessionClosed{{kLocalNode, 10}, "died"});
  EXPECT_EQ(actions().back(), "remove device=0 group=G");
  ASSERT_EQ(agent_.ended().size(), 1u);
  events();
  agent_.handle(EngineDown{{kLocalNode, 0}, "died", {}});
  EXPECT_TRUE(agent_.ended().empty());
  const std::vector<Event> said = events();
  ASSERT_EQ(said.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<EngineDown>(said[0]));
  EXPECT_TRUE(std::holds_alternative<JoinRequest>(said[1]));
}

TEST_F(AgentAlone, OfSessionsThatHaveClosedNothingIsRemembered) {
  welcome();
  serve();
  EXPECT_EQ(agent_.num_sessions(), 1u);
  agent_.handle(SessionClosed{{kLocalNode, 10}, "died"});
  EXPECT_EQ(agent_.num_sessions(), 0u);
  order(SendMember{{3, 0}, kGroup, {0, {3, 10}, make_member_id(256, 1), 0}});
  EXPECT_EQ(agent_.num_sessions(), 0u) << "said before the coordinator has heard of it";
}

TEST_F(AgentAlone, WhomTheCoordinatorHasForgottenAttachesAnew) {
  welcome();
  hear(PutOut{"the coordinator does not know it"}, 4, 0);
  EXPECT_FALSE(agent_.attached());
}

TEST_F(AgentAlone, EvictsRanksOfItsOwnNode) {
  welcome();
  serve();
  EXPECT_EQ(agent_.evict({kGroup + 1, 0, "was evicted"}).code(), StatusCode::kNotFound);
  const Status far = agent_.evict({kGroup, 1, "was evicted"});
  EXPECT_EQ(far.code(), StatusCode::kUnsupported);
  EXPECT_EQ(far.message(), "rank 1 of group " + std::to_string(kGroup) +
                               " is on node node-b; allowed on node a: its own ranks");
  EXPECT_EQ(agent_.evict({kGroup, 2, "was evicted"}).code(), StatusCode::kNotFound);
  EXPECT_TRUE(events().empty());
  EXPECT_TRUE(agent_.evict({kGroup, 0, "was evicted"}).ok());
  const std::vector<Event> said = events();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(std::get<EvictRank>(said[0]).rank, 0u);
  after_ms(3'000);
  EXPECT_EQ(agent_.evict({kGroup, 0, "was evicted"}).code(), StatusCode::kAborted) << "no coordinator";
}

// It was lost with a coordinator that died before it had decided, though epctl had said that it was done.
TEST_F(AgentAlone, AnEvictionIsSaidToEachCoordinatorWhileTheMemberIsHere) {
  welcome();
  serve();
  EXPECT_TRUE(agent_.evict({kGroup, 0, "was evicted"}).ok());
  EXPECT_TRUE(agent_.evict({kGroup, 0, "was evicted again"}).ok());
  for (std::uint64_t term = 5; term < 8; ++term) {
    events();
    agent_.channel_began();
    EXPECT_EQ(last_attach().groups.size(), 1u);
    welcome({kGroup}, term);
    const std::vector<Event> said = events();
    ASSERT_EQ(said.size(), 1u) << term;
    EXPECT_EQ(std::get<EvictRank>(said[0]).group_id, kGroup);
    EXPECT_EQ(std::get<EvictRank>(said[0]).how, "was evicted again");
  }
  hear(PutOut{"silent for 2000 ms"}, 7);
  welcome({}, 7, 9);
  EXPECT_TRUE(events().empty()) << "the group ends here";
}

// Another member has come to its rank.
TEST_F(AgentAlone, AnEvictionIsNotSaidOfWhoHasRejoined) {
  welcome();
  serve();
  EXPECT_TRUE(agent_.evict({kGroup, 0, "was evicted"}).ok());
  order(ReleaseMemory{{3, 0}, kGroup, 0});
  JoinRequest join = join_request(10, 0, 2);
  join.id.number = 103;
  agent_.handle(join);
  const RequestId request{{3, 10}, 103};
  order(AcquireMemory{{3, 0}, request, kGroup, 0, kUid, join.join.shape});
  agent_.handle(MemoryAcquired{request, kGroup, 0, {}});
  order(SendMember{{3, 0}, kGroup, {0, {3, 10}, make_member_id(256, 2), 0}});
  ReplyJoined joined{request, {}, {}};
  joined.message.group_id = kGroup;
  order(joined);
  ASSERT_TRUE(agent_.groups().at(kGroup).has_member(10, make_member_id(256, 2)));
  agent_.channel_began();
  welcome({kGroup}, 5);
  for (const Event& event : events()) EXPECT_FALSE(std::holds_alternative<EvictRank>(event));
}

// No coordinator knows of the join any more, so none will decide.
TEST_F(AgentAlone, AnEvictedJoinIsRefusedBeforeTheNextCoordinator) {
  welcome();
  const JoinRequest join = join_request(10, 0, 2);
  agent_.handle(join);
  const RequestId request{{3, 10}, 100};
  order(AcquireMemory{{3, 0}, request, kGroup, 0, kUid, join.join.shape});
  agent_.handle(MemoryAcquired{request, kGroup, 0, {}});
  actions();
  EXPECT_TRUE(agent_.evict({kGroup, 0, "was evicted"}).ok());
  agent_.channel_began();
  EXPECT_EQ(actions(),
            (Lines{"refused session=10 request=100 status=ABORTED", "free device=0 group=G rank=0"}));
  EXPECT_EQ(refusal_.message(), "rank 0 was evicted");
  events();
  agent_.channel_began();
  welcome({}, 5);
  EXPECT_TRUE(events().empty());
}

TEST_F(AgentAlone, EvictsRanksOfGroupsThatEndHere) {
  welcome();
  serve();
  hear(PutOut{"silent for 2000 ms"});
  welcome({}, 4, 9);
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 1, 3}});
  actions();
  EXPECT_TRUE(agent_.evict({kGroup, 0, "was evicted"}).ok());
  EXPECT_EQ(actions().back(), "remove device=0 group=G");
}

// A confirmed eviction is carried out, whoever ends the group.
TEST_F(AgentAlone, AnEvictionIsCarriedOutThoughItsGroupEndsHere) {
  welcome();
  serve();
  EXPECT_TRUE(agent_.evict({kGroup, 0, "was evicted"}).ok());
  hear(PutOut{"silent for 2000 ms"});
  welcome({}, 4, 9);
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 1, 3}});
  EXPECT_EQ(actions().back(), "remove device=0 group=G") << "nobody has to leave it";
}

TEST_F(AgentAlone, KnowsWhatIsToBeShownOfItsGroups) {
  welcome();
  serve();
  const NearGroup& group = agent_.groups().at(kGroup);
  EXPECT_EQ(group.phase(), GroupPhase::kActive);
  EXPECT_EQ(group.far_engine_of(0), nullptr) << "it is here";
  EXPECT_EQ(group.far_engine_of(1)->node, "node-b");
  GroupWaits waits{{kLocalNode, 0}, {kGroup, {}}};
  abi::set_text(waits.message.text, "for node-b", 10);
  agent_.handle(waits);
  EXPECT_EQ(group.waits(), "; for node-b");
  SendBreak stop{{3, 0}, {}, {}, false};
  stop.message.group_id = kGroup;
  stop.message.epoch = 1;
  order(stop);
  EXPECT_EQ(group.phase(), GroupPhase::kBreaking);
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 1, 3}});
  EXPECT_EQ(group.phase(), GroupPhase::kBreaking);
  order(SendFarEngine{{3, 0}, {{9, 0}, "node-c", "address-c"}});
  order(SendRank{{3, 0}, kGroup, {1, {9, 0}, 2}});
  SendResume resume{{3, 0}, {}, {}, {}};
  resume.message.view = 2;
  resume.message.group_id = kGroup;
  resume.message.epoch = 2;
  order(resume);
  EXPECT_EQ(group.phase(), GroupPhase::kActive);
  EXPECT_EQ(group.epoch, 2u);
  EXPECT_EQ(group.waits(), "");
  EXPECT_EQ(group.far_engine_of(1)->node, "node-c");
  EXPECT_EQ(group.far_engines.size(), 1u) << "nobody is on node-b any more";
  stop.message.fatal = 1;
  order(stop);
  EXPECT_EQ(group.phase(), GroupPhase::kFailing);
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 2, 3}});
  EXPECT_EQ(group.phase(), GroupPhase::kLost);
  order(SendRemoveGroup{{3, 0}, {kGroup}});
  EXPECT_EQ(group.phase(), GroupPhase::kRemoving);
}

TEST_F(AgentAlone, WhoWasPutOutEndsItsGroupsAndAttachesAnew) {
  welcome();
  serve();
  hear(PutOut{"silent for 2000 ms"});
  EXPECT_FALSE(agent_.attached());
  welcome({}, 4, 9);
  EXPECT_EQ(actions(),
            (Lines{"break device=0 group=G epoch=1 fatal=1 cause=RANK_LOST failed_rank=0 fail_from=0"}));
  EXPECT_EQ(break_text_, "rank 0 was lost: node a was put out of the cluster: silent for 2000 ms");
}

// The node of another rank has died together with the coordinator.
TEST_F(AgentAlone, OfAGroupThatANewCoordinatorHasNotAnotherRankIsLost) {
  welcome();
  serve();
  agent_.channel_began();
  welcome({}, 5);
  EXPECT_EQ(actions(),
            (Lines{"break device=0 group=G epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=0"}));
  EXPECT_EQ(break_text_, "rank 1 was lost: the coordinator was restarted without its group");
}

TEST_F(AgentAlone, AJoinWaitsUntilTheGroupIsForgottenHere) {
  welcome();
  serve();
  hear(PutOut{"silent for 2000 ms"});
  welcome({}, 4, 9);
  events();
  agent_.handle(join_request(11, 0, 2));
  EXPECT_TRUE(events().empty());
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 1, 3}});
  agent_.handle(LeaveRequest{{{kLocalNode, 10}, 101}, make_member_id(256, 1)});
  agent_.handle(GroupRemoved{{kLocalNode, 0}, {kGroup}});
  EXPECT_EQ(events().size(), 1u);
}

TEST_F(AgentAlone, AJoinThatWaitsInVainForThatSaysWhoIsStillThere) {
  welcome();
  serve();
  hear(PutOut{"silent for 2000 ms"});
  welcome({}, 4, 9);
  actions();
  JoinRequest join = join_request(11, 0, 2);
  join.join.timeout_ms = 1'000;
  agent_.handle(join);
  after_ms(1'000);
  EXPECT_EQ(actions(), (Lines{"refused session=11 request=100 status=DEADLINE_EXCEEDED"}));
  EXPECT_EQ(
      refusal_.message(),
      "group \"g\" has ended on this node, and is still in use by rank 0 (session 10, pid 0); allowed: to "
      "join when it is left");
}

TEST_F(AgentAlone, SilenceIsSaidInItsHeartbeats) {
  welcome();
  agent_.take_messages();
  after_ms(100);
  EXPECT_TRUE(std::get<AgentHeartbeat>(agent_.take_messages().at(0).body).hears);
  after_ms(2'000);
  EXPECT_FALSE(std::get<AgentHeartbeat>(agent_.take_messages().at(0).body).hears);
}

}  // namespace
}  // namespace epd::membership
