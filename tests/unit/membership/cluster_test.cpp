// Agents and the coordinator, each alone, by the messages between them.
#include "membership/agent.h"
#include "membership/coordinator.h"

#include "membership_fixture.h"

#include <algorithm>
#include <functional>

namespace epd::membership {
namespace {

const ClusterTimes kTimes{100, 2'000, 10'000};
const MembershipLimits kLimits{8, 60'000, 3'000, 10'000, 30'000, kLastEpoch};

JoinRequest join_request(std::uint64_t session, std::uint32_t rank, std::uint32_t ranks) {
  JoinRequest request;
  request.id = {{kLocalNode, session}, 100};
  request.uid = kUid;
  std::strcpy(request.join.group, "g");
  request.join.rank = static_cast<std::int32_t>(rank);
  request.join.shape = spanning_shape_of(ranks, LossPolicy::kDegrade);
  return request;
}

// ---- the coordinator

class CoordinatorAlone : public testing::Test {
 protected:
  explicit CoordinatorAlone(std::uint64_t first_term = 1) : coordinator_(begin(first_term)) {}

  std::unique_ptr<Coordinator> begin(std::uint64_t first_term) {
    return std::make_unique<Coordinator>(clock_,
                                         Coordinator::Options{kTimes, kLimits, first_term,
                                                              [this] {
                                                                return EpochKey{next_key_++, 1};
                                                              }},
                                         store_);
  }
  static ToCoordinator attach(const std::string& boot = "1", std::uint64_t term = 0,
                              std::uint32_t number = 0) {
    Attach message;
    message.attempt = 5;
    message.boot = boot;
    message.number = number;
    message.devices = {{"host:0", {}}};
    message.engines = {{0, "address"}};
    return {term, message};
  }
  ToCoordinator told(const Event& event) const { return {coordinator_->term(), Told{event}}; }
  void after_ms(std::uint64_t ms) {
    clock_.advance_ms(ms);
    coordinator_->tick();
  }
  void say(const std::string& node, const ToCoordinator& message) { coordinator_->handle(node, message); }
  // But for heartbeats.
  std::vector<ToAgent> take(const std::string& node) {
    std::vector<ToAgent> messages;
    for (Coordinator::Sent& sent : coordinator_->take_messages()) {
      if (sent.node == node && !std::holds_alternative<CoordinatorHeartbeat>(sent.message.body))
        messages.push_back(std::move(sent.message));
    }
    return messages;
  }
  void open_with(const std::vector<std::string>& nodes) {
    for (const std::string& node : nodes) say(node, attach());
    after_ms(2'000);
    coordinator_->take_messages();
  }

  ManualClock clock_;
  std::uint64_t next_key_ = 1;
  EmbeddedStore store_;
  std::unique_ptr<Coordinator> coordinator_;
};

TEST_F(CoordinatorAlone, ListensFirstAndThenWelcomesAll) {
  say("a", attach());
  after_ms(1'999);
  EXPECT_TRUE(take("a").empty());
  EXPECT_TRUE(coordinator_->listening());
  after_ms(1);
  const std::vector<ToAgent> messages = take("a");
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(std::get<Welcome>(messages[0].body).attempt, 5u);
  EXPECT_EQ(messages[0].number, 1u);
  EXPECT_EQ(coordinator_->nodes().at("a").state, NodeEntry::State::kUp);
}

TEST_F(CoordinatorAlone, ItsTermIsHigherThanAnyThatIsReported) {
  say("a", attach("1", 7));
  say("b", attach("1", 3));
  after_ms(2'000);
  EXPECT_EQ(coordinator_->term(), 8u);
  say("a", told(join_request(10, 0, 1)));
  const auto& order = std::get<Order>(take("a").back().body);
  EXPECT_EQ(std::get<AcquireMemory>(order.action).group_id,
            (std::uint64_t{1} << 63) | (std::uint64_t{8} << 32) | 1);
  EXPECT_EQ(order.heard, 1u);
}

TEST_F(CoordinatorAlone, StopsWhenItHearsOfAHigherTerm) {
  open_with({"a"});
  say("b", attach("1", 9));
  EXPECT_TRUE(coordinator_->superseded());
  say("a", told(join_request(10, 0, 1)));
  EXPECT_TRUE(coordinator_->take_messages().empty());
  EXPECT_EQ(coordinator_->next_due_ns(), kNever);
}

TEST_F(CoordinatorAlone, StopsWhenTheStoreHasAnotherTerm) {
  open_with({"a"});
  ASSERT_TRUE(store_.begin(2));
  say("a", told(join_request(10, 0, 1)));
  const auto wanted = std::get<AcquireMemory>(std::get<Order>(take("a").back().body).action);
  say("a", told(MemoryAcquired{wanted.request, wanted.group_id, 0, {}}));
  EXPECT_TRUE(coordinator_->superseded());
  EXPECT_TRUE(store_.views().empty());
  EXPECT_TRUE(take("a").empty());
}

TEST_F(CoordinatorAlone, ANodeIsLostThatIsSilentOrHearsNothing) {
  open_with({"a", "b", "c"});
  for (int i = 0; i < 21; ++i) {
    after_ms(100);
    say("a", {1, AgentHeartbeat{}});
    say("b", {1, AgentHeartbeat{false}});
  }
  EXPECT_EQ(coordinator_->nodes().at("a").state, NodeEntry::State::kUp);
  EXPECT_EQ(coordinator_->nodes().at("b").state, NodeEntry::State::kLost);
  EXPECT_EQ(coordinator_->nodes().at("c").state, NodeEntry::State::kLost);
  EXPECT_EQ(coordinator_->nodes().at("c").text, "silent for 2000 ms");
}

TEST_F(CoordinatorAlone, ALostNodeHasToAttachAnewAndIsAnotherOne) {
  open_with({"a", "b"});
  coordinator_->node_gone("b", "connecting to it is refused");
  coordinator_->take_messages();
  say("b", told(EngineUp{{0, 0}, "address"}));
  ASSERT_EQ(take("b").size(), 1u);
  say("b", attach("1", 1, 2));
  const std::vector<ToAgent> messages = take("b");
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_TRUE(std::get<Welcome>(messages[0].body).groups.empty());
  EXPECT_EQ(messages[0].number, 3u);
}

TEST_F(CoordinatorAlone, AnotherRunOfADaemonIsAnotherNode) {
  open_with({"a"});
  say("a", told(join_request(10, 0, 2)));
  EXPECT_EQ(coordinator_->groups().size(), 1u);
  say("a", attach("2"));
  EXPECT_TRUE(coordinator_->groups().empty());
  const std::vector<ToAgent> messages = take("a");
  EXPECT_TRUE(std::holds_alternative<Welcome>(messages.back().body));
  EXPECT_EQ(messages.back().number, 2u);
}

TEST_F(CoordinatorAlone, ANodeSpeaksForItselfAlone) {
  open_with({"a", "b"});
  say("a", told(join_request(10, 0, 2)));
  const std::uint64_t group = coordinator_->groups().begin()->first;
  const JoinRequest of_a = [] {
    JoinRequest request = join_request(10, 0, 2);
    request.id.session.node = 1;
    return request;
  }();
  say("b", told(MemoryAcquired{of_a.id, group, 0, {}}));
  say("b", told(SessionClosed{{1, 10}, "died"}));
  say("b", told(NodeLost{1, "lied"}));
  say("b", told(EvictRank{group, 0, "lied"}));
  say("b", told(ViewStored{group, 1}));
  ASSERT_EQ(coordinator_->groups().size(), 1u);
  EXPECT_FALSE(coordinator_->groups().at(group).arrivals.at(0).member.holds_memory);
  EXPECT_EQ(coordinator_->nodes().at("a").state, NodeEntry::State::kUp);
  EXPECT_EQ(coordinator_->nodes().at("b").state, NodeEntry::State::kUp);
}

// ---- what it remembers

TEST_F(CoordinatorAlone, ALostNodeIsForgottenAfterAWhile) {
  open_with({"a", "b"});
  coordinator_->node_gone("b", "connecting to it is refused");
  for (int second = 0; second < 599; ++second) {
    after_ms(1'000);
    say("a", {1, AgentHeartbeat{}});
  }
  EXPECT_EQ(coordinator_->nodes().size(), 2u);
  after_ms(1'000);
  EXPECT_EQ(coordinator_->nodes().size(), 1u);
  take("b");
  say("b", {1, AgentHeartbeat{}});
  const std::vector<ToAgent> messages = take("b");
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<PutOut>(messages[0].body)) << "it has to attach anew";
  EXPECT_EQ(messages[0].number, 0u);
  say("b", {1, Superseded{}});
  EXPECT_TRUE(take("b").empty());
}

TEST_F(CoordinatorAlone, OfLostNodesNoMoreThanSoManyAreRemembered) {
  open_with({"a"});
  for (std::size_t i = 0; i < kMaxLostNodes + 10; ++i) {
    const std::string name = "lost-" + std::to_string(i);
    clock_.advance_ms(1);
    say(name, attach());
    coordinator_->node_gone(name, "connecting to it is refused");
    say("a", {1, AgentHeartbeat{}});
  }
  after_ms(1);
  EXPECT_EQ(coordinator_->nodes().size(), kMaxLostNodes + 1);
  EXPECT_TRUE(coordinator_->nodes().contains("a"));
  EXPECT_FALSE(coordinator_->nodes().contains("lost-9"));
  EXPECT_TRUE(coordinator_->nodes().contains("lost-10"));
}

TEST_F(CoordinatorAlone, OfGroupsThatHaveEndedNothingIsLeft) {
  open_with({"a"});
  for (int i = 0; i < 100; ++i) {
    say("a", told(join_request(10, 0, 1)));
    const auto wanted = std::get<AcquireMemory>(std::get<Order>(take("a").back().body).action);
    const std::uint64_t id = wanted.group_id;
    say("a", told(MemoryAcquired{wanted.request, id, 0, {}}));
    EXPECT_EQ(store_.views().size(), 1u);
    say("a", told(GroupReady{{0, 0}, {id, StatusCode::kOk, {}}, {}}));
    say("a", told(SessionClosed{{0, 10}, "died"}));
    say("a", told(MemberStopped{{0, 0}, {id, 0, 0, 3}}));
    say("a", told(Broken{{0, 0}, {id, 1, 3}}));
    say("a", told(GroupRemoved{{0, 0}, {id}}));
    EXPECT_TRUE(coordinator_->groups().empty());
    EXPECT_TRUE(store_.views().empty());
    take("a");
  }
}

// ---- what it does not believe

TEST_F(CoordinatorAlone, ATermOutOfAllReasonIsNone) {
  say("b", attach("1", ~std::uint64_t{0}));
  say("a", attach("1", 7));
  after_ms(2'000);
  EXPECT_EQ(coordinator_->term(), 8u);
  EXPECT_FALSE(coordinator_->nodes().contains("b"));
  say("b", attach("1", ~std::uint64_t{0}));
  EXPECT_FALSE(coordinator_->superseded());
}

TEST_F(CoordinatorAlone, ANodeEvictsItsOwnRanksAlone) {
  open_with({"a", "b"});
  for (const std::uint32_t rank : {0u, 1u}) {
    const std::string node = rank == 0 ? "a" : "b";
    say(node, told(join_request(10, rank, 3)));
    const auto wanted = std::get<AcquireMemory>(std::get<Order>(take(node).back().body).action);
    say(node, told(MemoryAcquired{wanted.request, wanted.group_id, rank, {}}));
  }
  const Group& group = coordinator_->groups().begin()->second;
  ASSERT_EQ(group.members.size(), 2u);
  say("b", told(EvictRank{group.id, 0, "was evicted"}));
  EXPECT_EQ(group.members.size(), 2u);
  say("b", told(EvictRank{group.id, 1, "was evicted"}));
  EXPECT_EQ(group.members.size(), 1u);
  EXPECT_EQ(std::get<ReplyRefused>(std::get<Order>(take("b").front().body).action).status.message(),
            "rank 1 was evicted");
}

// ---- an agent

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
  EXPECT_EQ(agent_.groups().at(kGroup).near_part().created_ns, then);
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

// Of another group, or one that works again, it says nothing any more.
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
  EXPECT_EQ(group.near_part().waits(), "; for node-b");
  SendBreak stop{{3, 0}, {}, {}, false};
  stop.message.group_id = kGroup;
  stop.message.epoch = 1;
  order(stop);
  EXPECT_EQ(group.phase(), GroupPhase::kBreaking);
  agent_.handle(Broken{{kLocalNode, 0}, {kGroup, 1, 3}});
  EXPECT_EQ(group.phase(), GroupPhase::kBreaking);
  order(SendFarEngine{{3, 0}, {{9, 0}, "node-c", "address-c"}});
  order(SendRank{{3, 0}, kGroup, {1, {9, 0}, 2}});
  SendResume resume{{3, 0}, {}, {}, 2, {}};
  resume.message.group_id = kGroup;
  resume.message.epoch = 2;
  order(resume);
  EXPECT_EQ(group.phase(), GroupPhase::kActive);
  EXPECT_EQ(group.told.epoch, 2u);
  EXPECT_EQ(group.near_part().waits(), "");
  EXPECT_EQ(group.far_engine_of(1)->node, "node-c");
  EXPECT_EQ(group.told.far_engines.size(), 1u) << "nobody is on node-b any more";
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
  EXPECT_EQ(break_text_, "rank 1 was lost: the coordinator has started anew without its group");
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

TEST_F(AgentAlone, SilenceIsSaidInItsHeartbeats) {
  welcome();
  agent_.take_messages();
  after_ms(100);
  EXPECT_TRUE(std::get<AgentHeartbeat>(agent_.take_messages().at(0).body).hears);
  after_ms(2'000);
  EXPECT_FALSE(std::get<AgentHeartbeat>(agent_.take_messages().at(0).body).hears);
}

// ---- one coordinator after another

// What two agents report of a group that both serve.
class Reports : public CoordinatorAlone {
 protected:
  Reports() : CoordinatorAlone(6) {}

  static constexpr std::uint64_t kGroup = (std::uint64_t{1} << 63) | 7;

  static ToCoordinator report_of(std::uint32_t rank, std::uint64_t epoch = 4) {
    ToCoordinator message = attach("1", 5, rank + 1);
    GroupReport group;
    group.told.label = {kGroup, kUid, "g"};
    group.told.shape = spanning_shape_of(2, LossPolicy::kDegrade);
    group.told.shape.sum_ranks = 1;
    group.told.epoch = epoch;
    group.told.view = 2;
    group.told.ranks = {{0, {1, 0}, 1}, {1, {2, 0}, 1}};
    group.ranks = {{rank, 0, 10, make_member_id(256, 3), kUid, 1000, 0, 0, 0, 100, 1, 0}};
    std::get<Attach>(message.body).groups = {group};
    return message;
  }
};

TEST_F(Reports, AGroupInWhichNothingIsOwedGoesOn) {
  say("a", report_of(0));
  say("b", report_of(1));
  after_ms(2'000);
  for (const ToAgent& message : take("b")) {
    EXPECT_EQ(message.number, 2u);
    EXPECT_EQ(std::get<Welcome>(message.body).groups, (std::vector<std::uint64_t>{kGroup}));
  }
  ASSERT_TRUE(coordinator_->groups().contains(kGroup));
  EXPECT_EQ(store_.views().at(kGroup).view, 2u);
  say("b", told(SessionClosed{{0, 10}, "died"}));
  const std::vector<ToAgent> messages = take("a");
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(std::get<SendBreak>(std::get<Order>(messages[0].body).action).message.epoch, 4u);
}

TEST_F(Reports, OneThatIsNotWhollyReportedEnds) {
  say("a", report_of(0));
  after_ms(2'000);
  EXPECT_TRUE(std::get<Welcome>(take("a").at(0).body).groups.empty());
  EXPECT_TRUE(coordinator_->groups().empty());
}

TEST_F(Reports, OneOfWhichTwoThingsAreReportedEnds) {
  say("a", report_of(0));
  say("b", report_of(1, 5));
  after_ms(2'000);
  EXPECT_TRUE(coordinator_->groups().empty());
}

// Each is what no honest node reports. Node c reports it of a group of its own, and of that of the others.
const std::vector<std::function<void(GroupReport&)>>& lies() {
  static const std::vector<std::function<void(GroupReport&)>> all = {
      [](GroupReport& r) { r.ranks[0].member = 0; },
      [](GroupReport& r) { r.ranks[0].member = make_member_id(255, 1); },
      [](GroupReport& r) { r.ranks[0].member = make_member_id(512, 1); },
      [](GroupReport& r) { r.ranks[0].member = make_member_id(256, 0); },
      [](GroupReport& r) { r.ranks[0].rank = 1; },
      [](GroupReport& r) { r.ranks[0].rank = ~0u; },
      [](GroupReport& r) { r.ranks[0].device = 1; },
      [](GroupReport& r) { r.ranks[0].uid = 0; },
      [](GroupReport& r) { r.ranks[0].bound = ~0u; },
      [](GroupReport& r) { r.ranks[0].priority = 1 << 20; },
      [](GroupReport& r) { r.ranks[0].active_since = 0; },
      [](GroupReport& r) { r.ranks[0].active_since = 9; },
      [](GroupReport& r) { r.ranks.push_back(r.ranks[0]); },
      [](GroupReport& r) { r.ranks.clear(); },
      [](GroupReport& r) { r.told.ranks.clear(); },
      [](GroupReport& r) { r.told.ranks.resize(2000); },
      [](GroupReport& r) { r.told.ranks[0].rank = 5; },
      [](GroupReport& r) { r.told.ranks[0].engine.node = 1; },
      [](GroupReport& r) { r.told.ranks[0].active_since = r.ranks[0].active_since = 1'000; },
      [](GroupReport& r) { r.told.epoch = 0; },
      [](GroupReport& r) { r.told.label.name = ""; },
      [](GroupReport& r) { r.told.label.name = std::string(1'000, 'x'); },
      [](GroupReport& r) { r.told.shape.num_ranks = 0; },
      [](GroupReport& r) { r.told.shape.num_ranks = ~0u; },
      [](GroupReport& r) { r.told.shape.hidden = 1; },
      [](GroupReport& r) { r.told.shape.depth = 0; },
      [](GroupReport& r) { r.told.shape.span = abi::Span::kNode; },
      [](GroupReport& r) { r.told.shape.sum_ranks = 0; },
      [](GroupReport& r) { r.asked_sum_ranks = 7; },
  };
  return all;
}
class Lies : public Reports, public testing::WithParamInterface<std::size_t> {};

TEST_P(Lies, AreDroppedAndHurtNobodyElse) {
  GroupReport own;
  own.told.label = {kGroup + 1, kUid, "own"};
  own.told.shape = spanning_shape_of(1, LossPolicy::kDegrade);
  own.told.shape.sum_ranks = 1;
  own.told.epoch = 4;
  own.told.ranks = {{0, {3, 0}, 1}};
  own.ranks = {{0, 0, 10, make_member_id(256, 3), kUid, 1000, 0, 0, 0, 100, 1, 0}};
  lies().at(GetParam())(own);
  GroupReport same = own;
  same.told.label.id = kGroup;
  GroupReport later = own;
  later.told.label.id = (std::uint64_t{1} << 63) | (std::uint64_t{6} << 32) | 1;
  ToCoordinator message = attach("1", 5, 3);
  std::get<Attach>(message.body).groups = {own, same, later};
  say("a-liar", message);
  say("b", report_of(0));
  say("c", report_of(1));
  after_ms(2'000);
  EXPECT_EQ(coordinator_->groups().size(), 1u);
  ASSERT_TRUE(coordinator_->groups().contains(kGroup));
  EXPECT_EQ(coordinator_->groups().at(kGroup).members.size(), 2u);
  for (const auto& [name, node] : coordinator_->nodes()) EXPECT_TRUE(node.attach.groups.empty()) << name;
  EXPECT_TRUE(std::get<Welcome>(take("a-liar").at(0).body).groups.empty());
}
INSTANTIATE_TEST_SUITE_P(All, Lies, testing::Range<std::size_t>(0, lies().size()));

TEST_F(Reports, AGroupOfTheNextCoordinatorIsNone) {
  ToCoordinator message = report_of(0);
  auto& groups = std::get<Attach>(message.body).groups;
  groups[0].told.label.id = (std::uint64_t{1} << 63) | (std::uint64_t{6} << 32) | 1;
  groups[0].told.ranks[1].active_since = 0;
  say("a", message);
  after_ms(2'000);
  EXPECT_TRUE(coordinator_->groups().empty());
}

TEST_F(Reports, WhoComesTooLateEndsIts) {
  say("a", attach());
  after_ms(2'000);
  coordinator_->take_messages();
  say("b", report_of(1));
  const std::vector<ToAgent> messages = take("b");
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_TRUE(std::get<Welcome>(messages[0].body).groups.empty());
  EXPECT_NE(messages[0].number, 2u);
}

}  // namespace
}  // namespace epd::membership
