// Groups that span nodes: sum domains by node, addresses, lost nodes, nodes that can't reach each
// other.
#include "membership_fixture.h"

#include <algorithm>

namespace epd::membership {
namespace {

constexpr std::uint64_t kFirst = (std::uint64_t{1} << 63) | (std::uint64_t{5} << 32);

// Node n has one engine, {n, 0}, and sessions 10 + rank.
class SpanningByMessages : public testing::Test {
 protected:
  using Lines = std::vector<std::string>;

  void begin(std::uint32_t nodes) {
    for (std::uint32_t n = 1; n <= nodes; ++n) {
      handle(NodeUp{n,
                    {{"host:0", {}}},
                    "node-" + std::to_string(n),
                    "boot-" + std::to_string(n),
                    "10.0.0." + std::to_string(n) + ":7410"});
      handle(EngineUp{{n, 0}, "address-" + std::to_string(n)});
    }
    take();
  }
  void handle(const Event& event) { registry_.handle(event); }
  Lines tell(const Event& event) {
    handle(event);
    return take();
  }
  Lines tick_after(std::uint64_t ms) {
    clock_.advance_ms(ms);
    registry_.tick();
    return take();
  }
  Lines take() {
    Lines lines;
    actions_ = registry_.take_actions();
    for (const Action& action : actions_) {
      std::string line = to_string(action);
      const auto at = line.find(std::to_string(kFirst));
      if (at != std::string::npos) line.replace(at, std::to_string(kFirst).size(), "G");
      lines.push_back(line);
      if (const auto* refused = std::get_if<ReplyRefused>(&action)) refusal_ = refused->status;
      if (const auto* sent = std::get_if<SendBreak>(&action)) break_text_ = sent->message.text;
    }
    return lines;
  }

  // Rank r on the engine of nodes[r].
  JoinRequest join_of(std::uint32_t rank, std::uint32_t ranks, std::uint32_t node) const {
    JoinRequest request;
    request.id = {{node, 10 + rank}, 100 + rank};
    request.uid = kUid;
    request.engine = {node, 0};
    std::strcpy(request.join.group, "g");
    request.join.rank = static_cast<std::int32_t>(rank);
    request.join.shape = spanning_shape_of(ranks, policy_);
    request.join.shape.sum_ranks = sum_ranks_;
    return request;
  }
  Lines join_all(const std::vector<std::uint32_t>& nodes) {
    const auto ranks = static_cast<std::uint32_t>(nodes.size());
    for (std::uint32_t r = 0; r < ranks; ++r) handle(join_of(r, ranks, nodes[r]));
    for (std::uint32_t r = 0; r < ranks; ++r)
      handle(MemoryAcquired{join_of(r, ranks, nodes[r]).id, kFirst, r, {}});
    Lines lines = take();
    std::erase_if(lines, [](const std::string& line) { return line.starts_with("acquire"); });
    std::erase_if(actions_, [](const Action& a) { return std::holds_alternative<AcquireMemory>(a); });
    return lines;
  }
  void ready(std::uint32_t node) { handle(GroupReady{{node, 0}, {kFirst, StatusCode::kOk, {}}, {}}); }
  Lines broken(std::uint32_t node, std::uint64_t epoch, std::uint64_t next) {
    return tell(Broken{{node, 0}, {kFirst, epoch, next}});
  }
  Lines resumed(std::uint32_t node, std::uint64_t epoch) { return tell(Resumed{{node, 0}, {kFirst, epoch}}); }
  Lines out_of_reach(std::uint32_t node, std::uint32_t far) {
    return tell(PeerLost{{node, 0}, {far, 0}, "no answer"});
  }
  Lines corrupted(std::uint32_t node, std::uint32_t far) {
    return tell(PeerLost{{node, 0}, {far, 0}, "sent rows with a wrong checksum", abi::PeerLoss::kCorrupt});
  }
  void activate(const std::vector<std::uint32_t>& nodes) {
    join_all(nodes);
    for (const std::uint32_t node : std::set<std::uint32_t>(nodes.begin(), nodes.end())) ready(node);
    take();
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
  }
  const Group& group() const { return registry_.groups().at(kFirst); }
  std::set<std::uint32_t> living() const {
    std::set<std::uint32_t> ranks;
    for (const auto& [rank, member] : group().members) {
      if (!member.gone()) ranks.insert(rank);
    }
    return ranks;
  }
  static Lines breaks_of(Lines lines) {
    std::erase_if(lines, [](const std::string& line) { return !line.starts_with("break"); });
    return lines;
  }

  LossPolicy policy_ = LossPolicy::kDegrade;
  std::uint32_t sum_ranks_ = 0;
  std::uint64_t next_key_ = 1;
  ManualClock clock_;
  GroupRegistry registry_{clock_, MembershipLimits{4, 60'000, 3'000, 10'000, 30'000, kLastEpoch},
                          Spanning{kFirst, 256, [this] {
                                     return EpochKey{next_key_++, 9};
                                   }}};
  Actions actions_;
  Status refusal_;
  std::string break_text_;
};

// ---- beginning

TEST_F(SpanningByMessages, TheEnginesOfAllNodesAreToStart) {
  begin(2);
  EXPECT_EQ(join_all({1, 2}),
            (Lines{"start device=0 group=G broken=0 node=1", "start device=0 group=G broken=0 node=2"}));
}

TEST_F(SpanningByMessages, TheDescriptionSaysAll) {
  begin(2);
  join_all({1, 2});
  for (std::size_t i = 0; i < 2; ++i) {
    const GroupDescription& told = std::get<StartGroup>(actions_[i]).group;
    EXPECT_EQ(told.view, 1u);
    EXPECT_EQ(told.epoch_key, (EpochKey{1, 9}));
    EXPECT_EQ(told.shape.sum_ranks, 1u);
    ASSERT_EQ(told.far_engines.size(), 1u);
    const std::uint32_t far = i == 0 ? 2 : 1;
    EXPECT_EQ(told.far_engines[0].engine, (EngineId{far, 0}));
    EXPECT_EQ(told.far_engines[0].node, "node-" + std::to_string(far));
    EXPECT_EQ(told.far_engines[0].address, "address-" + std::to_string(far));
    ASSERT_EQ(told.members.size(), 1u);
    EXPECT_EQ(member_index(told.members[0].member), 256u) << "those of the node's own groups lie below";
  }
}

struct Places {
  std::vector<std::uint32_t> nodes;  // by rank
  std::uint32_t asked;
  std::uint32_t resolved;
};
class SumDomains : public SpanningByMessages, public testing::WithParamInterface<Places> {};
TEST_P(SumDomains, AreThoseOfTheNodesIfThatIsPossible) {
  sum_ranks_ = GetParam().asked;
  begin(3);
  join_all(GetParam().nodes);
  EXPECT_EQ(std::get<StartGroup>(actions_.front()).group.shape.sum_ranks, GetParam().resolved);
}
INSTANTIATE_TEST_SUITE_P(All, SumDomains,
                         testing::Values(Places{{1, 1, 2, 2}, 0, 2}, Places{{1, 1, 1, 2}, 0, 4},
                                         Places{{1, 2, 1, 2}, 0, 1}, Places{{2, 2, 2, 2}, 0, 4},
                                         Places{{1, 1, 2, 2, 1, 1}, 0, 2}, Places{{1, 2, 2, 3, 3, 1}, 0, 6},
                                         Places{{1, 1, 2, 2}, 4, 4}, Places{{1, 1, 1, 2}, 2, 2}));

TEST_F(SpanningByMessages, WhoComesLaterAsksForTheSameSumDomains) {
  begin(3);
  activate({1, 1, 2, 2});
  ASSERT_EQ(group().shape.sum_ranks, 2u);
  tell(SessionClosed{{2, 13}, "died"});
  JoinRequest other = join_of(3, 4, 3);
  other.id.number = 200;
  EXPECT_EQ(tell(other), Lines{}) << "waits for the break";
  sum_ranks_ = 4;
  EXPECT_EQ(tell(join_of(3, 4, 3)), (Lines{"refused session=13 request=103 status=INVALID_ARGUMENT node=3"}));
  EXPECT_EQ(refusal_.message(), "sum_ranks is 4, but the ranks already in group \"g\" have 2");
}

TEST_F(SpanningByMessages, GpusAreNotThereYet) {
  begin(1);
  JoinRequest request = join_of(0, 2, 1);
  request.device_kind = abi::DeviceKind::kCuda;
  EXPECT_EQ(tell(request), (Lines{"refused session=10 request=100 status=UNSUPPORTED node=1"}));
  EXPECT_EQ(
      refusal_.message(),
      "span is 1 (cluster); allowed: 0 (node) on CUDA devices: groups that span nodes are on host devices");
}

TEST_F(SpanningByMessages, GroupsOfOneNodeAreNotHere) {
  begin(1);
  JoinRequest request = join_of(0, 2, 1);
  request.join.shape.span = abi::Span::kNode;
  EXPECT_EQ(tell(request), (Lines{"refused session=10 request=100 status=UNSUPPORTED node=1"}));
  EXPECT_EQ(refusal_.message(), "span is 0 (node); allowed: 1 (cluster) in groups that span nodes");
}

TEST_F(SpanningByMessages, AnEngineWithoutANetworkServesNoneOfThem) {
  begin(2);
  tell(EngineUp{{1, 0}, ""});
  EXPECT_EQ(tell(join_of(0, 2, 1)), (Lines{"refused session=10 request=100 status=UNSUPPORTED node=1"}));
  EXPECT_EQ(refusal_.message(),
            "the engine of host:0 on node node-1 (10.0.0.1:7410) has no network to other nodes; see its log, "
            "and epctl doctor there");
  EXPECT_TRUE(registry_.groups().empty());
  tell(EngineUp{{1, 0}, "address-1"});
  EXPECT_EQ(tell(join_of(0, 2, 1)).size(), 1u);
}

TEST_F(SpanningByMessages, DevicesThatANodeHasNotAreRefused) {
  begin(1);
  JoinRequest request = join_of(0, 2, 1);
  request.engine.device = 4;
  EXPECT_EQ(tell(request), (Lines{"refused session=10 request=100 status=INVALID_ARGUMENT node=1"}));
  EXPECT_EQ(refusal_.message(), "device is 4; allowed: below 1 on node-1");
  request = join_of(0, 2, 1);
  request.device_kind = static_cast<abi::DeviceKind>(9);
  EXPECT_EQ(tell(request), (Lines{"refused session=10 request=100 status=INVALID_ARGUMENT node=1"}));
}

TEST_F(SpanningByMessages, AnEngineSaysNothingOfTheBoardsOfOthers) {
  begin(3);
  activate({1, 2});
  tell(EngineDown{{3, 0}, "died", {{kFirst, 0, 99}, {kFirst, 1, 99}, {77, 0, 1}}});
  tell(EngineDown{{1, 0}, "died", {{kFirst, 0, 5}, {kFirst, 1, 99}}});
  EXPECT_EQ(group().members.at(0).board_index, 5u);
  EXPECT_EQ(group().members.at(1).board_index, 0u);
}

TEST_F(SpanningByMessages, ABreakThatAnEngineAsksForHasACauseAndARank) {
  begin(2);
  activate({1, 2});
  tell(BreakRequested{{1, 0}, {kFirst, 1, 0, 0, static_cast<StatusCode>(1234), 77, {}}});
  EXPECT_EQ(group().reason.cause, StatusCode::kAborted);
  EXPECT_EQ(group().reason.failed_rank, -1);
}

// ---- addresses and keys

TEST_F(SpanningByMessages, AnEngineThatStartsAnewHasItsAddressTold) {
  begin(3);
  activate({1, 2, 3});
  tell(EngineDown{{2, 0}, "died", {}});
  EXPECT_EQ(tell(EngineUp{{2, 0}, "new"}), (Lines{"far_engine device=0 far=0 of node-2 at new node=1",
                                                  "far_engine device=0 far=0 of node-2 at new node=3",
                                                  "start device=0 group=G broken=1 node=2"}));
}

TEST_F(SpanningByMessages, SoHasAnEngineThatIsNewToTheGroup) {
  begin(3);
  activate({1, 2});
  tell(SessionClosed{{2, 11}, "died"});
  tell(MemberStopped{{2, 0}, {kFirst, 1, 0, 3}});
  broken(1, 1, 4);
  broken(2, 1, 4);
  JoinRequest request = join_of(1, 2, 3);
  tell(request);
  tell(MemoryAcquired{request.id, kFirst, 1, {}});
  broken(1, 2, 5);
  ready(3);
  EXPECT_EQ(
      take(),
      (Lines{"far_engine device=0 far=0 of node-3 at address-3 node=1",
             "rank device=0 group=G rank=1 since=3 node=1", "rank device=0 group=G rank=1 since=3 node=3",
             "member device=0 group=G rank=1 node=3", "resume device=0 group=G epoch=3 index=5 node=1",
             "resume device=0 group=G epoch=3 index=5 cause=ABORTED node=3"}));
  EXPECT_EQ(std::get<SendResume>(actions_[4]).epoch_key, std::get<SendResume>(actions_[5]).epoch_key);
  EXPECT_EQ(std::get<SendResume>(actions_[5]).epoch_key, (EpochKey{3, 9})) << "one for each epoch";
  EXPECT_EQ(std::get<SendResume>(actions_[5]).message.view, 3u);
}

// ---- views

TEST_F(SpanningByMessages, ABreakThatKeepsTheRanksKeepsTheView) {
  begin(2);
  activate({1, 2});
  tell(BreakRequested{{1, 0}, {kFirst, 1, 0, 0, StatusCode::kDeadlineExceeded, 1, {}}});
  broken(1, 1, 8);
  EXPECT_EQ(broken(2, 1, 7).size(), 2u);
  EXPECT_EQ(group().view, 1u);
}

TEST_F(SpanningByMessages, OtherRanksAreAnotherView) {
  begin(3);
  activate({1, 2, 3});
  tell(NodeLost{3, "silent for 2.0 s"});
  broken(1, 1, 8);
  EXPECT_EQ(broken(2, 1, 7), (Lines{"rank device=0 group=G rank=2 since=0 node=1",
                                    "rank device=0 group=G rank=2 since=0 node=2",
                                    "resume device=0 group=G epoch=2 index=7 node=1",
                                    "resume device=0 group=G epoch=2 index=7 node=2"}));
  EXPECT_EQ(group().view, 2u);
}

// ---- lost nodes

TEST_F(SpanningByMessages, UnderDegradeALostNodeIsOneBreakForAllOfItsRanks) {
  begin(2);
  activate({1, 2, 2, 1});
  EXPECT_EQ(tell(NodeLost{2, "silent for 2.0 s"}),
            (Lines{"break device=0 group=G epoch=1 fatal=0 cause=RANK_LOST failed_rank=1 node=1"}));
  EXPECT_EQ(break_text_, "ranks 1, 2 were lost: node node-2 (10.0.0.2:7410) was lost: silent for 2.0 s");
  EXPECT_EQ(broken(1, 1, 8).back(), "resume device=0 group=G epoch=2 index=8 node=1");
  EXPECT_EQ(living(), (std::set<std::uint32_t>{0, 3}));
  EXPECT_EQ(group().engines.size(), 1u);
  EXPECT_EQ(tell(EngineUp{{2, 0}, "late"}), Lines{}) << "its number names nobody any more";
}

TEST_F(SpanningByMessages, UnderFailFastEverythingInFlightFails) {
  policy_ = LossPolicy::kFailFast;
  begin(2);
  activate({1, 2, 2, 1});
  EXPECT_EQ(
      breaks_of(tell(NodeLost{2, "its daemon was killed"})),
      (Lines{"break device=0 group=G epoch=1 fatal=1 cause=RANK_LOST failed_rank=1 fail_from=0 node=1"}));
  broken(1, 1, 8);
  EXPECT_EQ(group().phase(), GroupPhase::kLost);
  tell(SessionClosed{{1, 10}, "died"});
  EXPECT_EQ(tell(SessionClosed{{1, 13}, "died"}).back(), "remove device=0 group=G node=1");
  tell(GroupRemoved{{1, 0}, {kFirst}});
  EXPECT_TRUE(registry_.groups().empty());
}

TEST_F(SpanningByMessages, TheLastLostNodesAreRemembered) {
  begin(1);
  for (std::uint32_t node = 2; node < kMaxLostNodes + 100; ++node) {
    tell(NodeUp{node, {{"host:0", {}}}, "node-b"});
    tell(NodeLost{node, "silent"});
  }
  EXPECT_EQ(registry_.num_nodes(), kMaxLostNodes + 1);
}

TEST_F(SpanningByMessages, ALostNodeEndsGroupsThatStart) {
  begin(2);
  join_all({1, 2});
  const Lines lines = tell(NodeLost{2, "silent"});
  EXPECT_EQ(lines, (Lines{"refused session=10 request=100 status=RANK_LOST node=1",
                          "remove device=0 group=G node=1"}));
  EXPECT_EQ(refusal_.message(),
            "rank 1 was lost: node node-2 (10.0.0.2:7410) was lost: silent while the group started");
}

TEST_F(SpanningByMessages, AndItsRanksMakeRoomInGroupsThatForm) {
  begin(3);
  const JoinRequest of_lost = join_of(1, 2, 2);
  tell(of_lost);
  tell(MemoryAcquired{of_lost.id, kFirst, 1, {}});
  tell(join_of(0, 2, 1));
  EXPECT_EQ(tell(NodeLost{2, "silent"}), Lines{});
  EXPECT_EQ(tell(join_of(1, 2, 3)), (Lines{"acquire device=0 group=G rank=1 session=11 node=3"}));
}

TEST_F(SpanningByMessages, TheLastNodeTakesTheGroupWithIt) {
  begin(1);
  activate({1, 1});
  EXPECT_EQ(tell(NodeLost{1, "silent"}), Lines{});
  EXPECT_TRUE(registry_.groups().empty());
}

// "here" and "there" were the other node's.
TEST_F(SpanningByMessages, WhatAnEngineSaysOfAGroupThatCannotStartNamesItsNode) {
  begin(2);
  join_all({1, 2});
  abi::GroupReady differs{kFirst, StatusCode::kInvalidArgument, "host:0 on node-1 has another network.check"};
  tell(GroupReady{{2, 0}, differs, {}});
  EXPECT_EQ(refusal_.message(), "node-2: host:0 on node-1 has another network.check");
}

// ---- nodes that can't reach each other

TEST_F(SpanningByMessages, AnEnginesDeathExplainsWhyItIsOutOfReach) {
  begin(2);
  activate({1, 2});
  EXPECT_EQ(out_of_reach(1, 2), Lines{});
  EXPECT_EQ(breaks_of(tell(EngineDown{{2, 0}, "died", {}})),
            (Lines{"break device=0 group=G epoch=1 fatal=0 cause=ENGINE_RESTARTED failed_rank=1 node=1"}));
  EXPECT_EQ(break_text_, "rank 1: node-2: died") << "all nodes hear it";
  EXPECT_EQ(tick_after(200), Lines{});
  EXPECT_GE(registry_.next_due_ns(), clock_.now_ns());
}

TEST_F(SpanningByMessages, OutOfReachIsABreakAndThenTheHigherNodeOfTwoGoes) {
  begin(2);
  activate({1, 2});
  EXPECT_EQ(out_of_reach(1, 2), Lines{});
  EXPECT_EQ(out_of_reach(2, 1), Lines{});
  EXPECT_EQ(tick_after(99), Lines{});
  EXPECT_EQ(tick_after(1),
            (Lines{"break device=0 group=G epoch=1 fatal=0 cause=ABORTED failed_rank=-1 node=1",
                   "break device=0 group=G epoch=1 fatal=0 cause=ABORTED failed_rank=-1 node=2"}));
  EXPECT_EQ(break_text_, "device 0 of node-1 has lost device 0 of node-2: no answer");
  broken(1, 1, 4);
  broken(2, 1, 4);
  EXPECT_EQ(out_of_reach(1, 2), Lines{});
  EXPECT_EQ(tick_after(100),
            (Lines{"stop_member device=0 group=G rank=1 node=2",
                   "break device=0 group=G epoch=2 fatal=0 cause=RANK_LOST failed_rank=1 node=1",
                   "break device=0 group=G epoch=2 fatal=0 cause=RANK_LOST failed_rank=1 node=2"}));
  EXPECT_EQ(break_text_,
            "rank 1 of node node-2 (10.0.0.2:7410) was put out: device 0 of node-1 has lost device 0 of "
            "node-2: no answer");
  broken(1, 2, 4);
  const Lines lines = broken(2, 2, 4);
  EXPECT_NE(std::find(lines.begin(), lines.end(),
                      "mark_lost device=0 group=G rank=1 cause=RANK_LOST failed_rank=1 node=2"),
            lines.end())
      << "its client lives, and hears of it";
  EXPECT_EQ(living(), (std::set<std::uint32_t>{0}));
}

TEST_F(SpanningByMessages, APairThatHasWorkedSinceIsTriedAgain) {
  begin(2);
  activate({1, 2});
  for (std::uint64_t epoch = 1; epoch < 4; ++epoch) {
    out_of_reach(1, 2);
    EXPECT_EQ(breaks_of(tick_after(100)).size(), 2u);
    broken(1, epoch, 4);
    broken(2, epoch, 4);
    resumed(1, epoch + 1);
    resumed(2, epoch + 1);
  }
  EXPECT_EQ(living().size(), 2u);
}

// A node was put out at the second flipped bit while its engines were slow to continue.
TEST_F(SpanningByMessages, ACorruptedMessageIsNoPairThatDoesNotReachEachOther) {
  begin(2);
  activate({1, 2});
  for (std::uint64_t epoch = 1; epoch < 4; ++epoch) {
    corrupted(1, 2);
    EXPECT_EQ(breaks_of(tick_after(100)).size(), 2u);
    for (const std::uint32_t node : {1u, 2u}) broken(node, epoch, 4);
  }
  EXPECT_EQ(living().size(), 2u) << "though neither has gone on since the first break";
  corrupted(1, 2);
  tick_after(100);
  EXPECT_EQ(living(), (std::set<std::uint32_t>{0})) << "as each break within a minute counts";
}

TEST_F(SpanningByMessages, APairThatWorksForNoMoreThanAMomentEachTimeIsPutOut) {
  begin(2);
  activate({1, 2});
  for (std::uint64_t epoch = 1; epoch < 4; ++epoch) {
    out_of_reach(epoch == 2 ? 2 : 1, epoch == 2 ? 1 : 2);
    EXPECT_EQ(breaks_of(tick_after(100)).size(), 2u);
    for (const std::uint32_t node : {1u, 2u}) broken(node, epoch, 4);
    for (const std::uint32_t node : {1u, 2u}) resumed(node, epoch + 1);
  }
  EXPECT_EQ(living().size(), 2u);
  out_of_reach(1, 2);
  tick_after(100);
  EXPECT_EQ(living(), (std::set<std::uint32_t>{0}));
  EXPECT_EQ(
      break_text_,
      "rank 1 of node node-2 (10.0.0.2:7410) was put out: device 0 of node-1 has lost device 0 of node-2"
      ": no answer; the group has broken 3 times within a minute for it");
}

// The honest node of the first pair to break too often was put out, and then the next one.
TEST_F(SpanningByMessages, ANodeThatBreaksWithAllOthersInTurnGoesItself) {
  begin(3);
  activate({1, 2, 3});
  std::uint64_t epoch = 1;
  for (const std::uint32_t from : {2u, 3u, 2u, 3u, 2u}) {
    out_of_reach(from, 1);
    EXPECT_EQ(breaks_of(tick_after(100)).size(), 3u);
    for (const std::uint32_t node : {1u, 2u, 3u}) broken(node, epoch, 4);
    ++epoch;
    for (const std::uint32_t node : {1u, 2u, 3u}) resumed(node, epoch);
  }
  EXPECT_EQ(living().size(), 3u);
  out_of_reach(2, 1);
  tick_after(100);
  EXPECT_EQ(living(), (std::set<std::uint32_t>{1, 2}));
}

TEST_F(SpanningByMessages, APairThatBreaksNowAndThenStays) {
  begin(2);
  activate({1, 2});
  for (std::uint64_t epoch = 1; epoch < 12; ++epoch) {
    out_of_reach(1, 2);
    EXPECT_EQ(breaks_of(tick_after(100)).size(), 2u);
    for (const std::uint32_t node : {1u, 2u}) broken(node, epoch, 4);
    for (const std::uint32_t node : {1u, 2u}) resumed(node, epoch + 1);
    tick_after(20'000);
  }
  EXPECT_EQ(living().size(), 2u);
}

TEST_F(SpanningByMessages, TheNodeThatMostCantReachGoesAlone) {
  begin(4);
  activate({1, 2, 3, 4});
  for (int round = 0; round < 2; ++round) {
    out_of_reach(1, 2);
    out_of_reach(3, 2);
    out_of_reach(2, 4);
    tick_after(100);
    const std::uint64_t epoch = group().epoch;
    for (std::uint32_t node = 1; node <= 4; ++node) broken(node, epoch, 4);
  }
  EXPECT_EQ(living(), (std::set<std::uint32_t>{0, 2, 3}));
}

// It uses memory of its own node alone.
TEST_F(SpanningByMessages, AnEngineRefusesNoRankOfAnotherNode) {
  begin(2);
  activate({1, 2});
  abi::RankRefused message{kFirst, 0, StatusCode::kInvalidArgument, {}};
  EXPECT_TRUE(tell(RankRefused{{2, 0}, message}).empty());
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  message.rank = 1;
  EXPECT_FALSE(tell(RankRefused{{2, 0}, message}).empty());
  EXPECT_EQ(living(), (std::set<std::uint32_t>{0}));
}

TEST_F(SpanningByMessages, OfEqualsTheOneWithFewerRanksGoes) {
  begin(2);
  activate({1, 2, 2});
  for (int round = 0; round < 2; ++round) {
    out_of_reach(2, 1);
    tick_after(100);
    for (std::uint32_t node = 1; node <= 2; ++node) broken(node, group().epoch, 4);
  }
  EXPECT_EQ(living(), (std::set<std::uint32_t>{1, 2}));
}

TEST_F(SpanningByMessages, UnderFailFastTheGroupEndsAndNamesThePair) {
  policy_ = LossPolicy::kFailFast;
  begin(2);
  activate({1, 2});
  for (int round = 0; round < 2; ++round) {
    out_of_reach(2, 1);
    tick_after(100);
    if (round == 0) {
      broken(1, 1, 4);
      broken(2, 1, 4);
    }
  }
  EXPECT_EQ(group().phase(), GroupPhase::kFailing);
  EXPECT_EQ(group().reason.text,
            "rank 1 of node node-2 (10.0.0.2:7410) was put out: device 0 of node-2 has lost device 0 of "
            "node-1: no answer");
}

}  // namespace
}  // namespace epd::membership
