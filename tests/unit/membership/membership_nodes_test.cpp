// A registry with several nodes: names are those of a node, and messages of different nodes come in any
// order.
#include "membership_messages.h"

#include <algorithm>
#include <cstddef>

namespace epd::membership {
namespace {

class NodesByMessages : public ByMessages {
 protected:
  NodesByMessages() : ByMessages(2) {}

  // Rank r of node r on device 0 there, by session 10 and request 100 of that node.
  JoinRequest join_at(std::uint32_t node, std::uint32_t rank) const {
    JoinRequest request = join_of(0, 2, node);
    request.join.rank = static_cast<std::int32_t>(rank);
    return request;
  }
  std::vector<JoinRequest> joins() const { return {join_at(0, 0), join_at(1, 1)}; }
};

TEST_F(NodesByMessages, EqualNumbersOfTwoNodesAreTwoSessionsAndTwoEngines) {
  EXPECT_EQ(tell(joins()[0]), (Lines{"acquire device=0 group=1 rank=0 session=10"}));
  EXPECT_EQ(tell(joins()[1]), (Lines{"acquire device=0 group=1 rank=1 session=10 node=1"}));
  tell(acquired(joins()[0], 0));
  EXPECT_EQ(tell(acquired(joins()[1], 1)),
            (Lines{"start device=0 group=1 broken=0", "start device=0 group=1 broken=0 node=1"}));
  const auto& start = std::get<StartGroup>(actions_[1]);
  EXPECT_EQ(start.group.ranks[0].engine, (EngineId{0, 0}));
  EXPECT_EQ(start.group.ranks[1].engine, (EngineId{1, 0}));
  ASSERT_EQ(start.group.members.size(), 1u);
  EXPECT_EQ(start.group.members[0].session, (SessionId{1, 10}));
  EXPECT_EQ(tell(ready({1, 0})), Lines{});
  EXPECT_EQ(tell(ready({0, 0})),
            (Lines{"joined session=10 request=100 rank=0", "joined session=10 request=100 rank=1 node=1"}));
  tell(SessionClosed{{1, 10}, "died"});
  EXPECT_TRUE(group().lives(0));
  EXPECT_FALSE(group().lives(1));
}

TEST_F(NodesByMessages, TheTextSaysWhichNodeASessionIsOf) {
  activate(joins());
  tell(SessionClosed{{1, 10}, "died"});
  EXPECT_EQ(group().reason.text, "rank 1 (session 10 of node 1, pid 1000) died");
}

TEST_F(NodesByMessages, DevicesThatDoNotReachEachOtherAreThoseOfOneNode) {
  for (const std::uint32_t node : {0u, 1u}) tell(NodeUp{node, {{"cuda:0", {1}}, {"cuda:1", {0}}}});
  tell(join_at(0, 0));
  JoinRequest far = join_at(1, 1);
  far.engine.device = 1;
  EXPECT_EQ(tell(far), (Lines{"acquire device=1 group=1 rank=1 session=10 node=1"}));
  tell(SessionClosed{far.id.session, "died"});
  JoinRequest near = join_of(1, 2);
  EXPECT_EQ(tell(near), (Lines{"refused session=11 request=101 status=UNSUPPORTED"}));
}

TEST_F(NodesByMessages, ANodeThatDrainsHasItsOwnJoinsRefused) {
  MembershipLimits limits;
  limits.conflict_ms = 250;
  registry_.set_limits(limits);
  tell(join_at(0, 0));
  for (const std::uint32_t node : {0u, 1u}) {
    JoinRequest late = join_at(node, 0);
    late.id.session.number = 77;
    EXPECT_EQ(tell(late), Lines{});
  }
  EXPECT_EQ(tell(NodeDrains{1, {StatusCode::kAborted, "draining"}}),
            (Lines{"refused session=77 request=100 status=ABORTED node=1"}));
  EXPECT_EQ(tick_after(251), (Lines{"refused session=77 request=100 status=INVALID_ARGUMENT"}));
}

TEST_F(NodesByMessages, AnEnginesBoardsComeWithItsEndAndWithItsSuccessorsAnswer) {
  activate(joins());
  EXPECT_EQ(tell(EngineDown{{1, 0}, "died", {{1, 1, 8}, {77, 0, 3}}}),
            (Lines{"break device=0 group=1 epoch=1 fatal=0 cause=ENGINE_RESTARTED failed_rank=1"}));
  EXPECT_EQ(group().reason.text, "rank 1: node 1: died") << "all nodes hear it";
  tell(broken({0, 0}, 1, 12));
  EXPECT_EQ(tell(EngineUp{{1, 0}}), (Lines{"start device=0 group=1 broken=1 node=1"}));
  EXPECT_EQ(tell(ready({1, 0}, {{1, 1, 9}})),
            (Lines{"resume device=0 group=1 epoch=2 index=9",
                   "resume device=0 group=1 epoch=2 index=9 cause=ENGINE_RESTARTED node=1"}))
      << "its successor has caught up";
  tell(EngineDown{{1, 0}, "died", {{1, 1, 11}}});
  EXPECT_EQ(tell(SessionClosed{{1, 10}, "died"}),
            (Lines{"mark_lost device=0 group=1 rank=1 cause=RANK_LOST failed_rank=1 node=1"}))
      << "the other engine owes its kBroken";
  EXPECT_EQ(tell(broken({0, 0}, 2, 12)).front(),
            "break device=0 group=1 epoch=2 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=11");
}

// ---- orders

using Said = std::vector<Event>;

// The messages of two nodes, each in its order, in every order of both.
std::vector<Said> all_orders(const Said& near, const Said& far) {
  std::vector<Said> orders;
  std::vector<bool> is_far(near.size() + far.size());
  std::fill(is_far.begin() + static_cast<std::ptrdiff_t>(near.size()), is_far.end(), true);
  do {
    Said all;
    auto next_near = near.begin();
    auto next_far = far.begin();
    for (const bool far_next : is_far) all.push_back(far_next ? *next_far++ : *next_near++);
    orders.push_back(std::move(all));
  } while (std::next_permutation(is_far.begin(), is_far.end()));
  return orders;
}

// Each order has a registry of its own.
class Orders : public testing::TestWithParam<Said> {
 protected:
  using Lines = std::vector<std::string>;

  Orders() {
    for (const std::uint32_t node : {0u, 1u}) {
      registry_.handle(NodeUp{node, {{"host:0", {}}}});
      registry_.handle(EngineUp{{node, 0}});
    }
  }
  void activate() {
    for (const Event& event : said_until_active(0)) registry_.handle(event);
    for (const Event& event : said_until_active(1)) registry_.handle(event);
    for (const std::uint32_t node : {0u, 1u})
      registry_.handle(GroupReady{{node, 0}, {1, StatusCode::kOk, {}}, {}});
    registry_.take_actions();
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
  }
  // The actions for each node, in its order.
  void tell_all() {
    for (const Event& event : GetParam()) {
      registry_.handle(event);
      for (const Action& action : registry_.take_actions())
        told_[node_of(action)].push_back(to_string(action));
    }
  }
  const Group& group() const { return registry_.groups().at(1); }

  // The messages of node r: rank r joins and gets its memory.
  static Said said_until_active(std::uint32_t node) {
    JoinRequest join;
    join.id = {{node, 10}, 100};
    join.uid = kUid;
    join.engine = {node, 0};
    std::strcpy(join.join.group, "g");
    join.join.rank = static_cast<std::int32_t>(node);
    join.join.shape = shape_of(2);
    return {join, MemoryAcquired{join.id, 1, node, {}}};
  }
  static Said said_in_a_break(std::uint32_t node) {
    BreakRequested wanted{{node, 0}, {}};
    wanted.message.group_id = 1;
    wanted.message.epoch = 1;
    wanted.message.cause = StatusCode::kDeadlineExceeded;
    return {wanted, Broken{{node, 0}, {1, 1, 7 + node}}};
  }
  static Said said_by_one_that_dies(std::uint32_t node) {
    return {SessionClosed{{node, 10}, "died"}, MemberStopped{{node, 0}, {1, node, 0, 6 + 2 * node}}};
  }

  ManualClock clock_;
  GroupRegistry registry_{clock_, MembershipLimits{4, 60'000, 3'000, 10'000, 30'000, kLastEpoch}};
  std::map<std::uint32_t, Lines> told_;  // by node

 public:
  static std::vector<Said> of_joins() { return all_orders(said_until_active(0), said_until_active(1)); }
  static std::vector<Said> of_breaks() { return all_orders(said_in_a_break(0), said_in_a_break(1)); }
  static std::vector<Said> of_deaths() {
    return all_orders(said_by_one_that_dies(0), said_by_one_that_dies(1));
  }
};

class OrdersOfJoins : public Orders {};
TEST_P(OrdersOfJoins, TheGroupStartsOnceWithBoth) {
  tell_all();
  EXPECT_EQ(group().phase(), GroupPhase::kStarting);
  EXPECT_EQ(told_[0],
            (Lines{"acquire device=0 group=1 rank=0 session=10", "start device=0 group=1 broken=0"}));
  EXPECT_EQ(told_[1], (Lines{"acquire device=0 group=1 rank=1 session=10 node=1",
                             "start device=0 group=1 broken=0 node=1"}));
}
INSTANTIATE_TEST_SUITE_P(All, OrdersOfJoins, testing::ValuesIn(Orders::of_joins()));

class OrdersOfBreaks : public Orders {};
TEST_P(OrdersOfBreaks, TwoRequestsAreOneBreakAndTheLeastIndexCounts) {
  activate();
  tell_all();
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(told_[0], (Lines{"break device=0 group=1 epoch=1 fatal=0 cause=DEADLINE_EXCEEDED failed_rank=0",
                             "resume device=0 group=1 epoch=2 index=7"}));
  EXPECT_EQ(told_[1],
            (Lines{"break device=0 group=1 epoch=1 fatal=0 cause=DEADLINE_EXCEEDED failed_rank=0 node=1",
                   "resume device=0 group=1 epoch=2 index=7 node=1"}));
}
INSTANTIATE_TEST_SUITE_P(All, OrdersOfBreaks, testing::ValuesIn(Orders::of_breaks()));

class OrdersOfDeaths : public Orders {};
TEST_P(OrdersOfDeaths, BothEnginesFailFromTheLeast) {
  activate();
  tell_all();
  EXPECT_EQ(group().phase(), GroupPhase::kFailing);
  for (const std::uint32_t node : {0u, 1u}) {
    Lines breaks = told_[node];
    std::erase_if(breaks, [](const std::string& line) { return !line.starts_with("break "); });
    ASSERT_FALSE(breaks.empty());
    EXPECT_NE(breaks.back().find("fail_from=6"), std::string::npos) << breaks.back();
    EXPECT_LE(breaks.size(), 2u);
  }
}
INSTANTIATE_TEST_SUITE_P(All, OrdersOfDeaths, testing::ValuesIn(Orders::of_deaths()));

}  // namespace
}  // namespace epd::membership
