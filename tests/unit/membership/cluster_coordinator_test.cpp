// A coordinator alone, by the messages between it and agents.
#include "membership/coordinator.h"

#include "one_side.h"

#include <algorithm>
#include <functional>
#include <set>

namespace epd::membership {
namespace {

class CoordinatorAlone : public testing::Test {
 protected:
  explicit CoordinatorAlone(std::uint64_t first_term = 1) : coordinator_(begin(first_term)) {}

  std::unique_ptr<Coordinator> begin(std::uint64_t first_term) {
    return std::make_unique<Coordinator>(
        clock_, Coordinator::Options{kTimes,
                                     kLimits,
                                     first_term,
                                     [this] {
                                       return EpochKey{next_key_++, 1};
                                     },
                                     {},
                                     [this](std::uint32_t) { return own_quota_; },
                                     [this](const std::string& node, std::uint32_t uid) {
                                       return node == untrusted_ && uid == kUid
                                                  ? Status(StatusCode::kPermissionDenied, "not that user")
                                                  : Status();
                                     }});
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
  // Engines of different nodes have different addresses.
  void say(const std::string& node, ToCoordinator message) {
    if (auto* attach = std::get_if<Attach>(&message.body); attach != nullptr && own_addresses_) {
      for (EngineReport& engine : attach->engines) engine.address += " of " + node;
    }
    coordinator_->handle(node, std::move(message));
  }
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

  // The last answer to a join that begins a group of that name; "": it waits for other ranks.
  std::string begin_group(const std::string& node, const std::string& group, std::uint32_t uid = kUid,
                          std::uint32_t rank = 0) {
    JoinRequest request = join_request(10, rank, 2);
    request.id.number = ++last_request_;
    request.uid = uid;
    std::strcpy(request.join.group, group.c_str());
    say(node, told(request));
    std::string text;
    for (const ToAgent& message : take(node)) {
      const auto* order = std::get_if<Order>(&message.body);
      const auto* refused = order == nullptr ? nullptr : std::get_if<ReplyRefused>(&order->action);
      if (refused != nullptr) text = refused->status.message();
    }
    return text;
  }

  ManualClock clock_;
  Quota own_quota_;
  std::string untrusted_;  // with kUid's ranks
  std::uint32_t last_request_ = 0;
  std::uint64_t next_key_ = 1;
  bool own_addresses_ = true;
  std::unique_ptr<Coordinator> coordinator_;
};

// A node that made up sessions, users and limits took all groups of the cluster.
TEST_F(CoordinatorAlone, ANodeThatMakesUpGroupsLeavesRoomForOthers) {
  open_with({"a", "b"});
  for (std::uint32_t i = 0; i < 6; ++i)
    EXPECT_EQ(begin_group("b", "made-up-" + std::to_string(i), 5'000 + i), "");
  EXPECT_EQ(begin_group("b", "made-up-6", 6'000),
            "ranks of this node alone are in 6 groups that span nodes; allowed: 6 (3/4 of the coordinator's "
            "limits.max_groups)");
  EXPECT_EQ(begin_group("a", "honest"), "");
  EXPECT_EQ(coordinator_->groups().size(), 7u);
}

// A node said how many groups its users may have.
TEST_F(CoordinatorAlone, TheCoordinatorsOwnLimitOfAUserHoldsToo) {
  own_quota_ = {2, "limits.max_groups_per_user"};
  open_with({"a", "b"});
  EXPECT_EQ(begin_group("a", "x"), "");
  EXPECT_EQ(begin_group("b", "y"), "");
  EXPECT_EQ(begin_group("b", "z"),
            "user " + std::to_string(kUid) + " has 2 groups; allowed: 2 (limits.max_groups_per_user)");
  EXPECT_EQ(begin_group("b", "z", kUid + 1), "");
}

// A node took the names of any user's groups, and of root's.
TEST_F(CoordinatorAlone, ANodeSpeaksForTheUsersThatItIsGiven) {
  untrusted_ = "b";
  open_with({"a", "b"});
  EXPECT_EQ(begin_group("b", "mine"), "not that user");
  EXPECT_TRUE(coordinator_->groups().empty());
  EXPECT_EQ(begin_group("b", "mine", kUid + 1), "");
  EXPECT_EQ(begin_group("a", "mine"), "");
}

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

TEST_F(CoordinatorAlone, WhoSaysTooMuchBeforeAllHaveReportedIsPutOutAndMayComeAgain) {
  say("a", attach());
  say("b", attach());
  for (std::uint64_t i = 0; i < 4096; ++i) say("a", told(join_request(10 + i, 0, 1)));
  EXPECT_TRUE(take("a").empty());
  say("a", told(join_request(9, 0, 1)));
  const std::vector<ToAgent> messages = take("a");
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(std::get<PutOut>(messages[0].body).text,
            "it has said more than 4096 things while the coordinator hears what the nodes have");
  EXPECT_EQ(coordinator_->nodes().count("a"), 0u);
  say("a", told(join_request(9, 0, 1)));
  EXPECT_TRUE(take("a").empty()) << "while the coordinator listens";
  say("a", attach());
  after_ms(2'000);
  EXPECT_EQ(coordinator_->nodes().at("a").state, NodeEntry::State::kUp);
  EXPECT_EQ(coordinator_->nodes().at("b").state, NodeEntry::State::kUp);
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

TEST_F(CoordinatorAlone, ANodeIsLostThatIsSilentOrHearsNothing) {
  open_with({"a", "b", "c"});
  for (int i = 0; i < 21; ++i) {
    after_ms(100);
    say("a", {1, AgentHeartbeat{true}});
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
    say("a", {1, AgentHeartbeat{true}});
  }
  EXPECT_EQ(coordinator_->nodes().size(), 2u);
  after_ms(1'000);
  EXPECT_EQ(coordinator_->nodes().size(), 1u);
  take("b");
  say("b", {1, AgentHeartbeat{true}});
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
    say("a", {1, AgentHeartbeat{true}});
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
    say("a", told(GroupReady{{0, 0}, {id, StatusCode::kOk, {}}, {}}));
    say("a", told(SessionClosed{{0, 10}, "died"}));
    say("a", told(MemberStopped{{0, 0}, {id, 0, 0, 3}}));
    say("a", told(Broken{{0, 0}, {id, 1, 3}}));
    say("a", told(GroupRemoved{{0, 0}, {id}}));
    EXPECT_TRUE(coordinator_->groups().empty());
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

// Its engine neither answers nor ends, and once it does end in time.
TEST_F(CoordinatorAlone, ANodeWhoseEngineCannotBeKilledIsPutOut) {
  open_with({"a", "b"});
  const auto acquired = [&](const std::string& node, std::uint32_t rank) {
    say(node, told(join_request(10, rank, 2)));
    const auto wanted = std::get<AcquireMemory>(std::get<Order>(take(node).back().body).action);
    say(node, told(MemoryAcquired{wanted.request, wanted.group_id, rank, {}}));
  };
  acquired("a", 0);
  acquired("b", 1);
  const std::uint64_t id = coordinator_->groups().begin()->first;
  say("a", told(GroupReady{{0, 0}, {id, StatusCode::kOk, {}}, {}}));
  std::size_t kills = 0;
  for (int i = 0; i < 2'000 && coordinator_->nodes().at("b").state == NodeEntry::State::kUp; ++i) {
    after_ms(100);
    for (const std::string node : {"a", "b"}) say(node, {coordinator_->term(), AgentHeartbeat{true}});
    for (Coordinator::Sent& sent : coordinator_->take_messages()) {
      const auto* order = std::get_if<Order>(&sent.message.body);
      if (order == nullptr) continue;
      if (const auto* kill = std::get_if<KillEngine>(&order->action)) {
        EXPECT_EQ(sent.node, "b");
        EXPECT_EQ(kill->engine.device, 0u);
        ++kills;
        // One that ends and comes again has been killed.
        if (kills == 3) {
          say("b", told(EngineDown{{0, 0}, "killed", {}}));
          say("b", told(EngineUp{{0, 0}, "address"}));
        }
      }
      if (std::holds_alternative<SendRemoveGroup>(order->action) && sent.node == "a")
        say("a", told(GroupRemoved{{0, 0}, {id}}));
    }
  }
  EXPECT_EQ(coordinator_->nodes().at("b").state, NodeEntry::State::kLost);
  EXPECT_EQ(coordinator_->nodes().at("b").text,
            "the engine of its device 0 was to be killed, and is not down after 60 s");
  EXPECT_FALSE(coordinator_->groups().contains(id)) << "nothing is held up";
}

TEST_F(CoordinatorAlone, AnyNumberOfEnginesHaveNoAddress) {
  own_addresses_ = false;
  for (const std::string node : {"a", "b"}) {
    ToCoordinator message = attach();
    std::get<Attach>(message.body).engines = {{0, ""}};
    say(node, message);
  }
  after_ms(2'000);
  coordinator_->take_messages();
  for (const std::string node : {"a", "b"}) {
    say(node, told(join_request(10, 0, 2)));
    const ToAgent last = take(node).back();
    EXPECT_EQ(std::get<ReplyRefused>(std::get<Order>(last.body).action).status.code(),
              StatusCode::kUnsupported);
  }
}

TEST_F(CoordinatorAlone, TheAddressOfAnotherNodesEngineIsNone) {
  own_addresses_ = false;  // b says that of a's
  open_with({"a", "b"});
  for (const std::uint32_t rank : {0u, 1u}) {
    const std::string node = rank == 0 ? "a" : "b";
    say(node, told(join_request(10, rank, 2)));
    const ToAgent last = take(node).back();
    const auto wanted = std::get<AcquireMemory>(std::get<Order>(last.body).action);
    say(node, told(MemoryAcquired{wanted.request, wanted.group_id, rank, {}}));
  }
  const auto b_starts = [&] {
    const std::vector<ToAgent> messages = take("b");
    return std::any_of(messages.begin(), messages.end(), [](const ToAgent& message) {
      const auto* order = std::get_if<Order>(&message.body);
      return order != nullptr && std::holds_alternative<StartGroup>(order->action);
    });
  };
  EXPECT_FALSE(b_starts()) << "its engine is not up";
  say("b", told(EngineUp{{0, 0}, "address"}));
  EXPECT_FALSE(b_starts());
  say("b", told(EngineUp{{0, 0}, "its own"}));
  EXPECT_TRUE(b_starts());
}

// ---- one coordinator after another

// The reports of two agents about a group that both serve.
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
    group.ranks = {{rank, 0, 10, make_member_id(256, 3), kUid, 1000, 0, 0, 100, 1, 0}};
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
  EXPECT_EQ(coordinator_->groups().at(kGroup).view, 2u);
  say("b", told(SessionClosed{{0, 10}, "died"}));
  const std::vector<ToAgent> messages = take("a");
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(std::get<SendBreak>(std::get<Order>(messages[0].body).action).message.epoch, 4u);
}

// After a failover it counted for the node of its first rank.
TEST_F(Reports, AGroupThatRanksOfSeveralNodesJoinedCountsForNoNode) {
  say("a", report_of(0));
  say("b", report_of(1));
  after_ms(2'000);
  for (std::uint32_t i = 0; i < 6; ++i) EXPECT_EQ(begin_group("a", "x" + std::to_string(i)), "");
  EXPECT_EQ(begin_group("a", "y"),
            "ranks of this node alone are in 6 groups that span nodes; allowed: 6 (3/4 of the coordinator's "
            "limits.max_groups)");
  EXPECT_EQ(begin_group("b", "x0", kUid, 1), "") << "it joins";
  EXPECT_EQ(begin_group("a", "y"), "");
  EXPECT_EQ(coordinator_->groups().size(), 8u);
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
  own.ranks = {{0, 0, 10, make_member_id(256, 3), kUid, 1000, 0, 0, 100, 1, 0}};
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

// A node may raise the term so far that the upper halves of ids begin again.
TEST_F(Reports, AGroupWhoseIdCouldBeOneOfItsOwnGoesOnAndNoOtherGetsItsId) {
  constexpr std::uint64_t kOwn = (std::uint64_t{1} << 63) | (std::uint64_t{6} << 32) | 1;
  for (const std::uint32_t rank : {0u, 1u}) {
    ToCoordinator message = report_of(rank);
    std::get<Attach>(message.body).groups[0].told.label.id = kOwn;
    say(rank == 0 ? "a" : "b", message);
  }
  after_ms(2'000);
  ASSERT_TRUE(coordinator_->groups().contains(kOwn));
  take("a");
  JoinRequest join = join_request(11, 0, 1);
  std::strcpy(join.join.group, "other");
  say("a", told(join));
  const auto& order = std::get<Order>(take("a").back().body);
  EXPECT_EQ(std::get<AcquireMemory>(order.action).group_id, kOwn + 1);
}

// ---- a node that may take part, beside a group of two others

class Liar : public Reports, public testing::WithParamInterface<std::string> {
 protected:
  // Sorts before or after the others by name.
  std::string liar() const { return GetParam(); }
  // A group of its own, with this number and this id.
  static GroupReport own_group(std::uint32_t number, std::uint64_t id) {
    GroupReport own;
    own.told.label = {id, kUid, "own"};
    own.told.shape = spanning_shape_of(1, LossPolicy::kDegrade);
    own.told.shape.sum_ranks = 1;
    own.told.epoch = 4;
    own.told.view = 2;
    own.told.ranks = {{0, {number, 0}, 1}};
    own.ranks = {{0, 0, 10, make_member_id(256, 3), kUid, 1000, 0, 0, 100, 1, 0}};
    return own;
  }
  void expect_the_group_goes_on(const ToCoordinator& lie) {
    say("b", report_of(0));
    say(liar(), lie);
    say("c", report_of(1));
    after_ms(2'000);
    ASSERT_TRUE(coordinator_->groups().contains(kGroup));
    EXPECT_EQ(coordinator_->groups().at(kGroup).members.size(), 2u);
    EXPECT_EQ(coordinator_->nodes().at("b").number, 1u);
    EXPECT_EQ(coordinator_->nodes().at("c").number, 2u);
    EXPECT_GT(coordinator_->nodes().at(liar()).number, 2u);
    const std::vector<ToAgent> messages = take("b");
    EXPECT_EQ(std::get<Welcome>(messages.at(0).body).groups, (std::vector<std::uint64_t>{kGroup}));
  }
};
INSTANTIATE_TEST_SUITE_P(Names, Liar, testing::Values("a", "d"));

// Groups of several nodes come first.
TEST_P(Liar, WhoReportsMoreGroupsThanThereMayBeKeepsSomeOfThem) {
  ToCoordinator lie = attach("1", 5, 3);
  auto& groups = std::get<Attach>(lie.body).groups;
  groups.clear();
  for (std::uint32_t i = 0; i < 600; ++i) {
    GroupReport own = own_group(3, kGroup + 1 + i);
    own.told.label.name = "own" + std::to_string(i);
    own.ranks[0].member = make_member_id(256 + i % 4, 3 + i / 4);
    groups.push_back(own);
  }
  expect_the_group_goes_on(lie);
  EXPECT_EQ(coordinator_->groups().size(), 1 + share_of_one(kLimits.max_groups));
}

TEST_P(Liar, AGroupOfAUserThatItIsNotGivenEnds) {
  untrusted_ = liar();
  ToCoordinator lie = attach("1", 5, 3);
  std::get<Attach>(lie.body).groups = {own_group(3, kGroup + 1)};
  expect_the_group_goes_on(lie);
  EXPECT_EQ(coordinator_->groups().size(), 1u);
}

TEST_P(Liar, WhoClaimsALaterTermEndsNoGroup) {
  expect_the_group_goes_on(attach("1", 5'000, 3));
}

TEST_P(Liar, WhoClaimsTheNumberOfAnotherEndsNoGroup) {
  expect_the_group_goes_on(attach("1", 5, 2));
}

TEST_P(Liar, AGroupUnderTheNumberOfAnotherEndsNoGroup) {
  ToCoordinator lie = attach("1", 5'000, 2);
  std::get<Attach>(lie.body).groups = {own_group(2, kGroup + 1)};
  expect_the_group_goes_on(lie);
  EXPECT_EQ(coordinator_->groups().size(), 1u);
}

TEST_P(Liar, AnotherGroupOfTheSameIdEndsNoGroup) {
  ToCoordinator lie = attach("1", 5'000, 3);
  std::get<Attach>(lie.body).groups = {own_group(3, kGroup), own_group(3, kGroup)};
  expect_the_group_goes_on(lie);
}

TEST_P(Liar, AGroupOfItsOwnGoesOnToo) {
  ToCoordinator message = attach("1", 5, 3);
  std::get<Attach>(message.body).groups = {own_group(3, kGroup + 1)};
  expect_the_group_goes_on(message);
  EXPECT_TRUE(coordinator_->groups().contains(kGroup + 1));
}

// After the highest number that a node may claim come the lowest that nobody has.
TEST_P(Liar, WhoClaimsAHighNumberKeepsNobodyOut) {
  constexpr std::uint32_t kHighest = 1u << 30;
  expect_the_group_goes_on(attach("1", 5, kHighest));
  std::set<std::uint32_t> numbers;
  for (const auto& [name, node] : coordinator_->nodes()) numbers.insert(node.number);
  for (int i = 0; i < 20; ++i) {
    const std::string name = "e" + std::to_string(i);
    say(name, attach("1", 5, kHighest));
    const std::uint32_t number = coordinator_->nodes().at(name).number;
    EXPECT_TRUE(number > 0 && number <= kHighest) << number;
    EXPECT_TRUE(numbers.insert(number).second) << number << " is in use";
  }
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
