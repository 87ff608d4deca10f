// Joining a group: who meets, what is checked, what is said; groups that form and never start.
#include "membership_fixture.h"
#include "proto/shape_rules.h"

namespace epd::membership {
namespace {

// Joins of one session, each to its group; `number` tells them apart.
JoinRequest of_session(JoinRequest request, std::uint64_t session, std::uint32_t number) {
  request.id.session.number = session;
  request.id.number = number;
  return request;
}

TEST_F(Membership, AGroupStartsWhenItsLastRankJoinsAndAnswersWhenEveryEngineIsReady) {
  join(request(0, 3));
  join(request(2, 3));
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(group().phase(), GroupPhase::kForming);
  join(request(1, 3));
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=0", "start device=1 group=1 broken=0"}));
  ready(0);
  EXPECT_TRUE(take().empty());
  ready(1);
  EXPECT_EQ(take(), (Lines{"joined session=10 request=100 rank=0", "joined session=11 request=101 rank=1",
                           "joined session=12 request=102 rank=2"}));
  EXPECT_EQ(group().phase(), GroupPhase::kActive);
  EXPECT_EQ(group().epoch, 1u);
}

TEST_F(Membership, RankMinusOneTakesTheLowestFreeOne) {
  join(request(1, 3));
  JoinRequest any = request(0, 3);
  any.join.rank = -1;
  join(any);
  EXPECT_EQ(group().members.at(0).session.number, 10u);
  any = request(5, 3);
  any.join.rank = -1;
  join(any);
  EXPECT_EQ(group().members.at(2).session.number, 15u);
}

TEST_F(Membership, ATakenRankIsRefusedAndNamesItsHolder) {
  join(request(1, 3));
  JoinRequest again = request(1, 3);
  again.id.session.number = 77;
  join(again);
  EXPECT_EQ(take(), (Lines{"refused session=77 request=101 status=INVALID_ARGUMENT"}));
  EXPECT_NE(refusal_.message().find("session 11 (pid 1001)"), std::string::npos) << refusal_.message();
  EXPECT_NE(refusal_.message().find("0, 2"), std::string::npos) << refusal_.message();
  EXPECT_EQ(group().members.at(1).session.number, 11u);
}

// A new process for rank 1, heard of before the end of the old one.
class Conflicts : public Membership {
 protected:
  Conflicts() {
    MembershipLimits limits;
    limits.max_groups = 4;
    limits.conflict_ms = 250;
    registry_.set_limits(limits);
  }
  JoinRequest newcomer(std::uint32_t number = 101) const {
    JoinRequest r = request(1, 3);
    r.id = {{kLocalNode, 77}, number};
    return r;
  }
};

TEST_F(Conflicts, AJoinForTheRankOfAProcessThatHasEndedWaitsUntilThatIsHeard) {
  for (const std::uint32_t rank : {0u, 1u}) join(request(rank, 3));
  join(newcomer());
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 250'000'000);
  session_closed(11, "died");
  EXPECT_EQ(registry_.next_due_ns(), 0u);
  tick();
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(group().members.at(1).session.number, 77u);
  clock_.advance_ms(251);
  tick();
  EXPECT_TRUE(take().empty());
}

TEST_F(Conflicts, AJoinForTheRankOfAProcessThatLivesIsRefusedAMomentLater) {
  for (const std::uint32_t rank : {0u, 1u}) join(request(rank, 3));
  join(newcomer());
  session_closed(10, "died");
  tick();
  EXPECT_TRUE(take().empty()) << "rank 1 is still taken";
  clock_.advance_ms(251);
  tick();
  EXPECT_EQ(take(), (Lines{"refused session=77 request=101 status=INVALID_ARGUMENT"}));
  EXPECT_NE(refusal_.message().find("session 11 (pid 1001)"), std::string::npos) << refusal_.message();
  EXPECT_EQ(group().members.at(1).session.number, 11u);
}

TEST_F(Conflicts, AGroupOfAnotherShapeGivesWayWhenItsLastSessionCloses) {
  join(request(1, 2));
  join(newcomer());
  EXPECT_TRUE(take().empty());
  session_closed(11, "died");
  tick();
  EXPECT_EQ(group(2).shape.num_ranks, 3u);
  EXPECT_EQ(group(2).members.at(1).session.number, 77u);
}

TEST_F(Conflicts, OneSessionHasFewAndTheyEndWithIt) {
  for (const std::uint32_t rank : {0u, 1u}) join(request(rank, 3));
  for (std::uint32_t i = 0; i < kMaxConflictsPerSession; ++i) join(newcomer(1 + i));
  EXPECT_TRUE(take().empty());
  join(newcomer(9));
  EXPECT_EQ(take(), (Lines{"refused session=77 request=9 status=INVALID_ARGUMENT"}));
  clock_.advance_ms(251);
  tick();
  EXPECT_EQ(take().size(), kMaxConflictsPerSession) << "and there is room again";
  for (std::uint32_t i = 0; i < kMaxConflictsPerSession; ++i) join(newcomer(11 + i));
  EXPECT_TRUE(take().empty());
  session_closed(77, "died");
  session_closed(11, "died");
  EXPECT_EQ(group().members.count(1), 0u);
  clock_.advance_ms(251);
  tick();
  EXPECT_TRUE(take().empty());
}

TEST_F(Conflicts, AreRefusedWhenTheDaemonAdmitsNobodyAnyMore) {
  for (const std::uint32_t rank : {0u, 1u}) join(request(rank, 3));
  join(newcomer());
  handle(NodeDrains{kLocalNode, {StatusCode::kAborted, "draining"}});
  EXPECT_EQ(take(), (Lines{"refused session=77 request=101 status=ABORTED"}));
  session_closed(11, "died");
  tick();
  EXPECT_EQ(group().members.count(1), 0u);
}

// A failure that is no fault of a rank of the group is refused at once, and the join is not tried for each
// session that closes.
TEST_F(Conflicts, AJoinThatFailsForAnotherReasonIsTriedOnce) {
  join(request(0, 3));
  memory_.limit = 1;
  join(newcomer());
  EXPECT_EQ(take(), (Lines{"refused session=77 request=101 status=RESOURCE_EXHAUSTED"}));
}

// Wrong in itself: nobody's end would help.
TEST_F(Conflicts, AWrongJoinIsRefusedAtOnce) {
  JoinRequest wrong = newcomer();
  wrong.join.rank = 9;
  join(wrong);
  EXPECT_EQ(take(), (Lines{"refused session=77 request=101 status=INVALID_ARGUMENT"}));
}

TEST_F(Membership, MemoryThatAnEngineCantUseRefusesTheWholeGroup) {
  for (std::uint32_t rank = 0; rank < 2; ++rank) join(request(rank, 2));
  take();
  abi::RankRefused message{1, 1, StatusCode::kInvalidArgument, {}};
  abi::set_text(message.text, "the memory is none", 18);
  say(0, message);
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=INVALID_ARGUMENT",
                           "refused session=11 request=101 status=INVALID_ARGUMENT",
                           "remove device=0 group=1", "remove device=1 group=1"}));
  EXPECT_EQ(refusal_.message(), "rank 1: the memory is none");
  say(1, message);
  EXPECT_TRUE(take().empty());
  removed(0);
  removed(1);
  EXPECT_FALSE(known());
}

struct BadField {
  const char* field;
  void (*spoil)(abi::Join&);
  const char* value;
};

TEST_F(Membership, EveryFieldIsCheckedByNameAndValue) {
  const BadField cases[] = {
      {"group name", [](abi::Join& j) { j.group[0] = '\0'; }, "0"},
      {"group name", [](abi::Join& j) { std::strcpy(j.group, "a b"); }, "32"},
      {"group name", [](abi::Join& j) { std::memset(j.group, 'x', sizeof(j.group)); }, "64"},
      {"num_ranks", [](abi::Join& j) { j.shape.num_ranks = 0; }, "0"},
      {"num_ranks", [](abi::Join& j) { j.shape.num_ranks = 1025; }, "1025"},
      {"num_experts", [](abi::Join& j) { j.shape.num_experts = 0; }, "0"},
      {"num_experts", [](abi::Join& j) { j.shape.num_experts = 7; }, "7"},
      {"num_experts", [](abi::Join& j) { j.shape.num_experts = 4098; }, "4098"},
      {"max_tokens", [](abi::Join& j) { j.shape.max_tokens = 65537; }, "65537"},
      {"max_tokens", [](abi::Join& j) { j.shape.max_tokens = 0; }, "0"},
      {"hidden", [](abi::Join& j) { j.shape.hidden = 0; }, "0"},
      {"hidden", [](abi::Join& j) { j.shape.hidden = 100; }, "100"},
      {"hidden", [](abi::Join& j) { j.shape.hidden = 16512; }, "16512"},
      {"topk", [](abi::Join& j) { j.shape.topk = 33; }, "33"},
      {"depth", [](abi::Join& j) { j.shape.depth = 0; }, "0"},
      {"depth", [](abi::Join& j) { j.shape.depth = 17; }, "17"},
      {"payload", [](abi::Join& j) { j.shape.payload = static_cast<abi::Payload>(9); }, "9"},
      {"index_type", [](abi::Join& j) { j.shape.index_type = static_cast<abi::IndexType>(8); }, "8"},
      {"policy", [](abi::Join& j) { j.shape.policy = static_cast<LossPolicy>(7); }, "7"},
      {"layout", [](abi::Join& j) { j.shape.layout = static_cast<abi::Layout>(3); }, "3"},
      {"scale_format", [](abi::Join& j) { j.shape.scale_format = static_cast<abi::ScaleFormat>(3); }, "3"},
      {"scale_format", [](abi::Join& j) { j.shape.scale_format = abi::ScaleFormat::kUe8m0; }, "fp8"},
      {"scale_format",
       [](abi::Join& j) {
         j.shape.payload = abi::Payload::kFp8;
         j.shape.scale_format = abi::ScaleFormat::kFloat32Pow2;
       },
       "as given"},
      {"scale_layout", [](abi::Join& j) { j.shape.scale_layout = static_cast<abi::ScaleLayout>(2); }, "2"},
      {"scale_layout", [](abi::Join& j) { j.shape.scale_layout = abi::ScaleLayout::kColumnMajor; }, "fp8"},
      {"range_format", [](abi::Join& j) { j.shape.range_format = static_cast<abi::RangeFormat>(2); }, "2"},
      {"range_format", [](abi::Join& j) { j.shape.range_format = abi::RangeFormat::kPacked64; }, "packed"},
      {"num_more_formats", [](abi::Join& j) { j.shape.num_more_formats = 4; }, "0 .. 3"},
      {"more_formats[2].payload", [](abi::Join& j) { j.shape.more_formats[2].payload = abi::Payload::kFp8; },
       "num_more_formats is 0"},
      {"more_formats[0].scale_format",
       [](abi::Join& j) { j.shape.more_formats[0].scale_format = abi::ScaleFormat::kUe8m0; },
       "num_more_formats is 0"},
      {"more_formats[0].payload",
       [](abi::Join& j) {
         j.shape.num_more_formats = 1;
         j.shape.more_formats[0].payload = abi::Payload::kOpaque;
       },
       "0 .. 2"},
      {"more_formats[0].payload", [](abi::Join& j) { j.shape.num_more_formats = 1; }, "the group's own"},
      {"expert_alignment", [](abi::Join& j) { j.shape.expert_alignment = 0; }, "0"},
      {"expert_alignment", [](abi::Join& j) { j.shape.expert_alignment = 257; }, "257"},
      {"opaque_bytes", [](abi::Join& j) { j.shape.opaque_bytes = 16; }, "unless payload is 3"},
      {"opaque_bytes", [](abi::Join& j) { j.shape.payload = abi::Payload::kOpaque; }, "16 .. 65536"},
      {"opaque_bytes",
       [](abi::Join& j) {
         j.shape.payload = abi::Payload::kOpaque;
         j.shape.opaque_bytes = 24;
       },
       "multiples of 16"},
      {"opaque_bytes",
       [](abi::Join& j) {
         j.shape.payload = abi::Payload::kOpaque;
         j.shape.opaque_bytes = 65552;
       },
       "65536"},
      {"num_biases", [](abi::Join& j) { j.shape.num_biases = 3; }, "3"},
      {"num_handles", [](abi::Join& j) { j.shape.num_handles = 4097; }, "4097"},
      {"max_recv_rows", [](abi::Join& j) { j.shape.max_recv_rows = 0x80000000u; }, "2147483647"},
      {"max_recv_rows", [](abi::Join& j) { j.shape.max_recv_rows = 2 * j.shape.max_tokens + 1; }, "worst"},
      {"sum_ranks", [](abi::Join& j) { j.shape.sum_ranks = 3; }, "num_ranks, which is 2"},
      {"sum_ranks", [](abi::Join& j) { j.shape.sum_ranks = 1025; }, "1025"},
      {"priority", [](abi::Join& j) { j.priority = 8; }, "-8 .. 7"},
      {"priority", [](abi::Join& j) { j.priority = -9; }, "-9"},
      {"rank", [](abi::Join& j) { j.rank = 2; }, "2"},
      {"rank", [](abi::Join& j) { j.rank = -2; }, "-2"},
  };
  for (const BadField& bad : cases) {
    JoinRequest r = request(0, 2);
    bad.spoil(r.join);
    join(r);
    EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=INVALID_ARGUMENT"})) << bad.field;
    EXPECT_EQ(refusal_.message().rfind(bad.field, 0), 0u) << refusal_.message();
    EXPECT_NE(refusal_.message().find(bad.value), std::string::npos) << refusal_.message();
    EXPECT_NE(refusal_.message().find("allowed"), std::string::npos) << refusal_.message();
  }
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_TRUE(memory_.held.empty());
}

TEST_F(Membership, AMismatchNamesFieldAndBothValuesAndHarmsNobody) {
  join(request(0, 2));
  JoinRequest other = request(1, 2);
  other.join.shape.hidden = 256;
  join(other);
  EXPECT_EQ(take(), (Lines{"refused session=11 request=101 status=INVALID_ARGUMENT"}));
  EXPECT_NE(refusal_.message().find("hidden is 256"), std::string::npos) << refusal_.message();
  EXPECT_NE(refusal_.message().find("128"), std::string::npos) << refusal_.message();
  join(request(1, 2));
  EXPECT_EQ(take().size(), 2u) << "the group starts";
}

// 0 is the daemon's choice: all ranks. A rank that says that itself joins the same group.
TEST_F(Membership, SumRanksIsChosenWhenTheFirstRankJoins) {
  JoinRequest said = request(1, 4);
  said.join.shape.sum_ranks = 4;
  join(request(0, 4));
  join(said);
  EXPECT_TRUE(take().empty()) << refusal_.message();
  ASSERT_EQ(registry_.groups().size(), 1u);
  EXPECT_EQ(registry_.groups().begin()->second.shape.sum_ranks, 4u);

  JoinRequest other = request(2, 4);
  other.join.shape.sum_ranks = 2;
  join(other);
  take();
  EXPECT_EQ(refusal_.message(), "sum_ranks is 2, but the ranks already in group \"g\" have 4");

  JoinRequest first = request(0, 4, "pairs");
  first.join.shape.sum_ranks = 2;
  join(of_session(first, 10, 200));
  EXPECT_TRUE(take().empty()) << refusal_.message();
  join(of_session(request(1, 4, "pairs"), 11, 200));
  take();
  EXPECT_EQ(refusal_.message(), "sum_ranks is 4, but the ranks already in group \"pairs\" have 2");
}

TEST_F(Membership, ARankIsToldOfAnotherOneOnItsDevice) {
  activate(3);  // ranks 0 and 2 are on device 0
  EXPECT_EQ(shares_device_, (std::map<std::uint64_t, std::uint32_t>{{10, 1}, {11, 0}, {12, 1}}));
}

TEST_F(Membership, GpusHaveOneSumDomain) {
  kind_ = abi::DeviceKind::kCuda;
  JoinRequest r = request(0, 4);
  r.join.shape.sum_ranks = 2;
  join(r);
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=UNSUPPORTED"}));
  EXPECT_EQ(
      refusal_.message(),
      "sum_ranks is 2; allowed: num_ranks, which is 4, or 0 on CUDA devices: smaller sum domains follow "
      "there later");
  EXPECT_TRUE(registry_.groups().empty());
  for (const std::uint32_t sum_ranks : {0u, 4u}) {
    r.join.shape.sum_ranks = sum_ranks;
    join(r);
    EXPECT_TRUE(take().empty()) << refusal_.message();
    session_closed(10, "test");
    take();
  }
}

// One of each kind that is on the edge, so that no rule above refuses too much.
TEST_F(Membership, ShapesAtTheLimitsAreTaken) {
  const std::vector<void (*)(abi::Join&)> changes = {
      [](abi::Join& j) { j.shape.max_recv_rows = 2 * j.shape.max_tokens; },
      [](abi::Join& j) { j.shape.sum_ranks = 1; },
      [](abi::Join& j) { j.shape.sum_ranks = 2; },
      [](abi::Join& j) {
        j.shape.payload = abi::Payload::kOpaque;
        j.shape.opaque_bytes = abi::kMaxOpaqueBytes;
      },
      [](abi::Join& j) {
        j.shape.payload = abi::Payload::kFp8;
        j.shape.scale_format = abi::ScaleFormat::kUe8m0;
      },
      [](abi::Join& j) {
        j.shape.payload = abi::Payload::kFp8Cast;
        j.shape.scale_format = abi::ScaleFormat::kFloat32Pow2;
        j.shape.scale_layout = abi::ScaleLayout::kColumnMajor;
      },
      [](abi::Join& j) {
        j.shape.num_more_formats = abi::kMaxMoreFormats;
        j.shape.more_formats[0].payload = abi::Payload::kFp8Cast;
        j.shape.more_formats[1].payload = abi::Payload::kFp8;
        j.shape.more_formats[2] = {abi::Payload::kFp8, abi::ScaleFormat::kUe8m0};
        j.shape.scale_layout = abi::ScaleLayout::kColumnMajor;
      },
      [](abi::Join& j) {
        j.shape.layout = abi::Layout::kPacked;
        j.shape.range_format = abi::RangeFormat::kPacked64;
        j.shape.expert_alignment = abi::kMaxAlignment;
        j.shape.max_recv_rows = abi::GroupShape(j.shape).recv_rows();
      },
      [](abi::Join& j) {
        j.shape.num_biases = abi::kMaxBiases;
        j.shape.num_handles = abi::kMaxHandles;
        j.priority = abi::kMinPriority;
      }};
  for (const auto& change : changes) {
    JoinRequest r = request(0, 2, "edge");
    change(r.join);
    join(r);
    EXPECT_TRUE(take().empty()) << refusal_.message();
    session_closed(r.id.session.number, "test");
    take();
  }
}

// A new field that the table forgets would not be compared.
TEST_F(Membership, EveryFieldOfAShapeIsCompared) {
  for (std::size_t i = 0; i < sizeof(abi::GroupShape) / 4; ++i) {
    abi::GroupShape changed = shape_of(2);
    auto* words = reinterpret_cast<std::uint32_t*>(&changed);
    ++words[i];
    const abi::ShapeField* field = abi::first_difference(shape_of(2), changed);
    ASSERT_NE(field, nullptr) << "word " << i;
    EXPECT_EQ(field, &abi::kShapeFields[i]);
  }
}

TEST_F(Membership, GroupAndMemoryLimitsRefuseTheJoinerOnly) {
  std::uint32_t number = 0;
  for (const char* name : {"a", "b", "c", "d"}) join(of_session(request(0, 2, name), 10, ++number));
  EXPECT_TRUE(take().empty());
  join(of_session(request(0, 2, "e"), 10, 5));
  EXPECT_EQ(take(), (Lines{"refused session=10 request=5 status=RESOURCE_EXHAUSTED"}));
  EXPECT_NE(refusal_.message().find("allowed: 4"), std::string::npos);
  memory_.limit = memory_.held.size();
  join(request(1, 2, "a"));
  EXPECT_EQ(take(), (Lines{"refused session=11 request=101 status=RESOURCE_EXHAUSTED"}));
  memory_.limit = 1000;
  join(request(1, 2, "a"));
  EXPECT_EQ(take().size(), 2u);
}

TEST_F(Membership, RanksOnDevicesThatDoNotReachEachOtherDoNotMeet) {
  set_apart(0, 1);
  join(request(0, 3));
  EXPECT_EQ(take(), Lines{});
  join(request(1, 3));
  EXPECT_EQ(take().size(), 1u);
  EXPECT_EQ(refusal_.code(), StatusCode::kUnsupported);
  EXPECT_EQ(
      refusal_.message(),
      "host:1 can't map the memory of host:0 (no P2P between them; nvidia-smi topo -p2p rw), and rank 0 of "
      "group \"g\" is on the latter");
  EXPECT_EQ(memory_.held.size(), 1u) << "the joiner's memory was never asked for";
  join(request(2, 3));  // on device 0 too
  EXPECT_EQ(take(), Lines{}) << "the others are not harmed";
}

TEST_F(Membership, AFirstJoinerWithoutMemoryLeavesNoGroup) {
  memory_.limit = 0;
  join(request(0, 2));
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=RESOURCE_EXHAUSTED"}));
  EXPECT_TRUE(registry_.groups().empty());
}

// Otherwise they would look for a rank that is there and has an error of its own.
TEST_F(Membership, WhoWaitsIsToldWhyTheMissingRankWasRefused) {
  join(request(0, 2));
  JoinRequest other = request(1, 2);
  other.join.shape.hidden = 256;
  join(other);
  clock_.advance_ms(60'000);
  tick();
  const Lines told = take();
  ASSERT_EQ(told.back(), "refused session=10 request=100 status=DEADLINE_EXCEEDED");
  EXPECT_NE(refusal_.message().find("missing: 1; rank 1 was refused: "), std::string::npos)
      << refusal_.message();
  EXPECT_NE(refusal_.message().find("hidden is 256"), std::string::npos) << refusal_.message();
}

TEST_F(Membership, TheJoinDeadlineNamesTheMissingRanks) {
  join(request(0, 4));
  JoinRequest impatient = request(2, 4);
  impatient.join.timeout_ms = 500;
  join(impatient);
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 500'000'000);
  clock_.advance_ms(499);
  tick();
  EXPECT_TRUE(take().empty());
  clock_.advance_ms(1);
  tick();
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=DEADLINE_EXCEEDED",
                           "refused session=12 request=102 status=DEADLINE_EXCEEDED"}));
  EXPECT_NE(refusal_.message().find("missing: 1, 3"), std::string::npos) << refusal_.message();
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_TRUE(memory_.held.empty());
  join(request(0, 4));  // the name is free again
  EXPECT_TRUE(take().empty());
}

TEST_F(Membership, UsersDoNotMeet) {
  join(request(0, 2));
  JoinRequest stranger = request(1, 2);
  stranger.uid = kUid + 1;
  join(stranger);
  EXPECT_TRUE(take().empty()) << "each waits in a group of its own";
  EXPECT_EQ(registry_.groups().size(), 2u);
}

TEST_F(Membership, AFormingGroupLosesTheRankOfAClosedSession) {
  join(request(0, 2));
  join(of_session(request(0, 2, "other"), 10, 1));
  session_closed(10, "died");
  EXPECT_TRUE(take().empty());
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_TRUE(memory_.held.empty());
  join(request(0, 3));
  join(request(1, 3));
  session_closed(11, "died");
  EXPECT_EQ(registry_.groups().size(), 1u);
  join(request(1, 3));
  join(request(2, 3));
  EXPECT_EQ(take().size(), 2u);
}

TEST_F(Membership, JoinsOfOneSessionWaitBesideEachOtherAndAreAnsweredInAnyOrder) {
  join(of_session(request(0, 2, "a"), 50, 1));
  join(of_session(request(0, 2, "b"), 50, 2));
  EXPECT_TRUE(take().empty());
  join(request(1, 2, "b"));
  for (std::uint32_t d = 0; d < 2; ++d) ready(d, 2);
  const Lines second = take();
  EXPECT_EQ(std::count(second.begin(), second.end(), "joined session=50 request=2 rank=0"), 1);
  join(of_session(request(1, 2, "a"), 11, 3));
  for (std::uint32_t d = 0; d < 2; ++d) ready(d, 1);
  const Lines first = take();
  EXPECT_EQ(std::count(first.begin(), first.end(), "joined session=50 request=1 rank=0"), 1);
  EXPECT_EQ(registry_.memberships({kLocalNode, 50}), 2u);
}

TEST_F(Membership, ARankAskedForTwiceByOneSessionIsRefusedAndTheFirstRequestStands) {
  join(of_session(request(0, 2), 50, 1));
  join(of_session(request(0, 2), 50, 2));
  EXPECT_EQ(take(), (Lines{"refused session=50 request=2 status=INVALID_ARGUMENT"}));
  EXPECT_EQ(refusal_.message(), "rank 0 of group \"g\" is taken by session 50 (pid 1000); free: 1");
  join(request(1, 2));
  for (std::uint32_t d = 0; d < 2; ++d) ready(d);
  const Lines lines = take();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "joined session=50 request=1 rank=0"), 1);
}

TEST_F(Membership, OneSessionMayHaveSeveralRanksOfAGroup) {
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    JoinRequest r = of_session(request(rank, 2), 50, 1 + rank);
    r.engine.device = 0;
    join(r);
  }
  ready(0);
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=0", "joined session=50 request=1 rank=0",
                           "joined session=50 request=2 rank=1"}));
  session_closed(50, "died");
  take();
  EXPECT_EQ(group().phase(), GroupPhase::kFailing);
}

TEST_F(Membership, ASessionThatEndsTakesAllThatItWaitsForAlong) {
  // Two ranks of a group that forms, one of a group that starts, one of a group that runs.
  join(of_session(request(0, 3, "forming"), 50, 1));
  join(of_session(request(1, 3, "forming"), 50, 2));
  join(of_session(request(0, 2, "starting"), 50, 3));
  join(request(1, 2, "starting"));
  join(of_session(request(0, 2, "running"), 50, 4));
  join(of_session(request(1, 2, "running"), 11, 102));
  for (std::uint32_t d = 0; d < 2; ++d) ready(d, 3);
  take();
  session_closed(50, "died");
  const Lines lines = take();
  EXPECT_FALSE(known(1)) << "nobody is left of it";
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "refused session=11 request=101 status=RANK_LOST"), 1);
  EXPECT_EQ(group(3).phase(), GroupPhase::kFailing);
  EXPECT_EQ(registry_.memberships({kLocalNode, 50}), 0u);
  for (const auto& [group, rank] : memory_.held) EXPECT_NE(group, 1u);
}

TEST_F(Membership, ARankLostWhileTheGroupStartsRefusesTheOthers) {
  join(request(0, 2));
  join(request(1, 2));
  take();
  ready(0);
  session_closed(11, "died");
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=RANK_LOST", "remove device=0 group=1",
                           "remove device=1 group=1"}));
  EXPECT_NE(refusal_.message().find("rank 1 (session 11, pid 1001) died"), std::string::npos);
  EXPECT_EQ(memory_.held.size(), 2u) << "engines may still have it mapped";
  ready(1);  // crossed our message
  removed(0);
  removed(1);
  EXPECT_TRUE(take().empty());
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_TRUE(memory_.held.empty());
}

TEST_F(Membership, AnEngineThatCannotServeTheGroupRefusesEveryJoiner) {
  join(request(0, 2));
  join(request(1, 2));
  take();
  abi::GroupReady bad{1, StatusCode::kResourceExhausted, {}};
  abi::set_text(bad.text, "no memory", 9);
  say(0, bad);
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=RESOURCE_EXHAUSTED",
                           "refused session=11 request=101 status=RESOURCE_EXHAUSTED",
                           "remove device=0 group=1", "remove device=1 group=1"}));
  EXPECT_EQ(refusal_.message(), "no memory");
}

class JoinOfSpanningGroup : public Membership {};

TEST_F(JoinOfSpanningGroup, IsRefusedHere) {
  JoinRequest r = request(0, 2);
  r.join.shape.span = abi::Span::kCluster;
  join(r);
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=UNSUPPORTED"}));
  EXPECT_EQ(refusal_.message(),
            "span is 1 (cluster); allowed: 0 (node), unless the daemon's configuration has [cluster]");
  EXPECT_TRUE(registry_.groups().empty());
}

}  // namespace
}  // namespace epd::membership
