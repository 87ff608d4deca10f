// The group protocol without processes: joining, leaving, breaking, engines that die.
#include "membership_fixture.h"
#include "proto/shape_rules.h"

namespace epd::membership {
namespace {

// ---- joining

TEST_F(Membership, AGroupStartsWhenItsLastRankJoinsAndAnswersWhenEveryEngineIsReady) {
  registry_.join(request(0, 3));
  registry_.join(request(2, 3));
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(group().phase, GroupPhase::kForming);
  registry_.join(request(1, 3));
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=0", "start device=1 group=1 broken=0"}));
  ready(0);
  EXPECT_TRUE(take().empty());
  ready(1);
  EXPECT_EQ(take(), (Lines{"joined session=10 request=100 rank=0", "joined session=11 request=101 rank=1",
                           "joined session=12 request=102 rank=2"}));
  EXPECT_EQ(group().phase, GroupPhase::kActive);
  EXPECT_EQ(group().epoch, 1u);
}

TEST_F(Membership, RankMinusOneTakesTheLowestFreeOne) {
  registry_.join(request(1, 3));
  JoinRequest any = request(0, 3);
  any.join.rank = -1;
  registry_.join(any);
  EXPECT_EQ(group().members.at(0).session_id, 10u);
  any = request(5, 3);
  any.join.rank = -1;
  registry_.join(any);
  EXPECT_EQ(group().members.at(2).session_id, 15u);
}

TEST_F(Membership, ATakenRankIsRefusedAndNamesItsHolder) {
  registry_.join(request(1, 3));
  JoinRequest again = request(1, 3);
  again.session_id = 77;
  registry_.join(again);
  EXPECT_EQ(take(), (Lines{"refused session=77 request=101 status=INVALID_ARGUMENT"}));
  EXPECT_NE(refusal_.message().find("session 11 (pid 1001)"), std::string::npos) << refusal_.message();
  EXPECT_NE(refusal_.message().find("0, 2"), std::string::npos) << refusal_.message();
  EXPECT_EQ(group().members.at(1).session_id, 11u);
}

TEST_F(Membership, MemoryThatAnEngineCantUseRefusesTheWholeGroup) {
  for (std::uint32_t rank = 0; rank < 2; ++rank) registry_.join(request(rank, 2));
  take();
  abi::RankRefused message{1, 1, StatusCode::kInvalidArgument, {}};
  abi::set_text(message.text, "the memory is none", 18);
  registry_.rank_refused(0, message);
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=INVALID_ARGUMENT",
                           "refused session=11 request=101 status=INVALID_ARGUMENT",
                           "remove device=0 group=1", "remove device=1 group=1"}));
  EXPECT_EQ(refusal_.message(), "rank 1: the memory is none");
  registry_.rank_refused(1, message);
  EXPECT_TRUE(take().empty());
  removed(0);
  removed(1);
  EXPECT_FALSE(known());
}

TEST_F(Membership, BindingsAreCheckedAgainstTheDescriptorsThatCame) {
  JoinRequest r = request(0, 2);
  r.join.bindings[0].memory = 1;
  r.join.bindings[0].stride = 16 * 256;
  registry_.join(r);
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=INVALID_ARGUMENT"}));
  EXPECT_NE(refusal_.message().find("binding of x: memory is 1; allowed: 0 (the arena) .. 0"),
            std::string::npos)
      << refusal_.message();
  r.memory = std::make_shared<const std::vector<UniqueFd>>(2);
  registry_.join(r);
  take();
  EXPECT_NE(refusal_.message().find("descriptor 2 of 2 is not bound"), std::string::npos)
      << refusal_.message();
  r.memory = std::make_shared<const std::vector<UniqueFd>>(1);
  registry_.join(r);
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(group(registry_.groups().begin()->first).members.at(0).bound, 1u);
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
      {"priority", [](abi::Join& j) { j.priority = 8; }, "-8 .. 7"},
      {"priority", [](abi::Join& j) { j.priority = -9; }, "-9"},
      {"commands", [](abi::Join& j) { j.commands = 2; }, "2"},
      {"rank", [](abi::Join& j) { j.rank = 2; }, "2"},
      {"rank", [](abi::Join& j) { j.rank = -2; }, "-2"},
  };
  for (const BadField& bad : cases) {
    JoinRequest r = request(0, 2);
    bad.spoil(r.join);
    registry_.join(r);
    EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=INVALID_ARGUMENT"})) << bad.field;
    EXPECT_EQ(refusal_.message().rfind(bad.field, 0), 0u) << refusal_.message();
    EXPECT_NE(refusal_.message().find(bad.value), std::string::npos) << refusal_.message();
    EXPECT_NE(refusal_.message().find("allowed"), std::string::npos) << refusal_.message();
  }
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_TRUE(memory_.held.empty());
}

TEST_F(Membership, AMismatchNamesFieldAndBothValuesAndHarmsNobody) {
  registry_.join(request(0, 2));
  JoinRequest other = request(1, 2);
  other.join.shape.hidden = 256;
  registry_.join(other);
  EXPECT_EQ(take(), (Lines{"refused session=11 request=101 status=INVALID_ARGUMENT"}));
  EXPECT_NE(refusal_.message().find("hidden is 256"), std::string::npos) << refusal_.message();
  EXPECT_NE(refusal_.message().find("128"), std::string::npos) << refusal_.message();
  registry_.join(request(1, 2));
  EXPECT_EQ(take().size(), 2u) << "the group starts";
}

// One of each kind that is on the edge, so that no rule above refuses too much.
TEST_F(Membership, ShapesAtTheLimitsAreTaken) {
  const std::vector<void (*)(abi::Join&)> changes = {
      [](abi::Join& j) { j.shape.max_recv_rows = 2 * j.shape.max_tokens; },
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
      },
      [](abi::Join& j) {
        j.shape.layout = abi::Layout::kPacked;
        j.shape.expert_alignment = abi::kMaxAlignment;
        j.shape.max_recv_rows = abi::GroupShape(j.shape).recv_rows();
      },
      [](abi::Join& j) {
        j.shape.num_biases = abi::kMaxBiases;
        j.shape.num_handles = abi::kMaxHandles;
        j.priority = abi::kMinPriority;
        j.commands = 1;
      }};
  for (const auto& change : changes) {
    JoinRequest r = request(0, 2, "edge");
    change(r.join);
    registry_.join(r);
    EXPECT_TRUE(take().empty()) << refusal_.message();
    registry_.session_closed(r.session_id, "test");
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
  for (const char* name : {"a", "b", "c", "d"}) registry_.join(request(0, 2, name));
  EXPECT_TRUE(take().empty());
  registry_.join(request(0, 2, "e"));
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=RESOURCE_EXHAUSTED"}));
  EXPECT_NE(refusal_.message().find("allowed: 4"), std::string::npos);
  memory_.limit = memory_.held.size();
  registry_.join(request(1, 2, "a"));
  EXPECT_EQ(take(), (Lines{"refused session=11 request=101 status=RESOURCE_EXHAUSTED"}));
  memory_.limit = 1000;
  registry_.join(request(1, 2, "a"));
  EXPECT_EQ(take().size(), 2u);
}

TEST_F(Membership, RanksOnDevicesThatDoNotReachEachOtherDoNotMeet) {
  memory_.apart.insert({0, 1});
  registry_.join(request(0, 3));
  EXPECT_EQ(take(), Lines{});
  registry_.join(request(1, 3));
  EXPECT_EQ(take().size(), 1u);
  EXPECT_EQ(refusal_.code(), StatusCode::kUnsupported);
  EXPECT_EQ(refusal_.message(),
            "device 1 does not reach device 0, and rank 0 of group \"g\" is on the latter");
  EXPECT_EQ(memory_.held.size(), 1u) << "the joiner's memory was never asked for";
  registry_.join(request(2, 3));  // on device 0 too
  EXPECT_EQ(take(), Lines{}) << "the others are not harmed";
}

TEST_F(Membership, CommandsNeedADeviceThatTakesThem) {
  memory_.launched.insert(1);
  JoinRequest by_stream = request(1, 2);
  by_stream.join.commands = 1;
  registry_.join(by_stream);
  EXPECT_EQ(take(), (Lines{"refused session=11 request=101 status=UNSUPPORTED"}));
  EXPECT_EQ(refusal_.message(), "device 1 takes no commands");
  EXPECT_TRUE(registry_.groups().empty());
  registry_.join(request(1, 2));
  by_stream = request(0, 2);
  by_stream.join.commands = 1;
  registry_.join(by_stream);
  EXPECT_EQ(take().size(), 2u) << "the group starts";
}

TEST_F(Membership, AFirstJoinerWithoutMemoryLeavesNoGroup) {
  memory_.limit = 0;
  registry_.join(request(0, 2));
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=RESOURCE_EXHAUSTED"}));
  EXPECT_TRUE(registry_.groups().empty());
}

TEST_F(Membership, TheJoinDeadlineNamesTheMissingRanks) {
  registry_.join(request(0, 4));
  JoinRequest impatient = request(2, 4);
  impatient.join.timeout_ms = 500;
  registry_.join(impatient);
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 500'000'000);
  clock_.advance_ms(499);
  registry_.tick();
  EXPECT_TRUE(take().empty());
  clock_.advance_ms(1);
  registry_.tick();
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=DEADLINE_EXCEEDED",
                           "refused session=12 request=102 status=DEADLINE_EXCEEDED"}));
  EXPECT_NE(refusal_.message().find("missing: 1, 3"), std::string::npos) << refusal_.message();
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_TRUE(memory_.held.empty());
  registry_.join(request(0, 4));  // the name is free again
  EXPECT_TRUE(take().empty());
}

TEST_F(Membership, UsersDoNotMeet) {
  registry_.join(request(0, 2));
  JoinRequest stranger = request(1, 2);
  stranger.uid = kUid + 1;
  registry_.join(stranger);
  EXPECT_TRUE(take().empty()) << "each waits in a group of its own";
  EXPECT_EQ(registry_.groups().size(), 2u);
}

TEST_F(Membership, AFormingGroupLosesTheRankOfAClosedSession) {
  registry_.join(request(0, 2));
  registry_.join(request(0, 2, "other"));
  registry_.session_closed(10, "died");
  EXPECT_TRUE(take().empty());
  EXPECT_TRUE(registry_.groups().empty());
  EXPECT_TRUE(memory_.held.empty());
  registry_.join(request(0, 3));
  registry_.join(request(1, 3));
  registry_.session_closed(11, "died");
  EXPECT_EQ(registry_.groups().size(), 1u);
  registry_.join(request(1, 3));
  registry_.join(request(2, 3));
  EXPECT_EQ(take().size(), 2u);
}

TEST_F(Membership, ARankLostWhileTheGroupStartsRefusesTheOthers) {
  registry_.join(request(0, 2));
  registry_.join(request(1, 2));
  take();
  ready(0);
  registry_.session_closed(11, "died");
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
  registry_.join(request(0, 2));
  registry_.join(request(1, 2));
  take();
  abi::GroupReady bad{1, StatusCode::kResourceExhausted, {}};
  abi::set_text(bad.text, "no memory", 9);
  registry_.group_ready(0, bad);
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=RESOURCE_EXHAUSTED",
                           "refused session=11 request=101 status=RESOURCE_EXHAUSTED",
                           "remove device=0 group=1", "remove device=1 group=1"}));
  EXPECT_EQ(refusal_.message(), "no memory");
}

// ---- leaving and dying

TEST_F(Membership, ADeadRankBreaksTheGroupFromItsFirstUnsubmittedOperation) {
  activate(3);
  registry_.session_closed(12, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=0 group=1 rank=2"}));
  stopped(2, 7);
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=2 fail_from=7",
                           "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=2 fail_from=7",
                           "stop_member device=0 group=1 rank=0", "stop_member device=1 group=1 rank=1"}));
  stopped(0, 7);
  stopped(1, 8);
  EXPECT_TRUE(take().empty()) << "all had submitted what lies below 7";
  EXPECT_EQ(break_text_, "rank 2 (session 12, pid 1002) died");
  broken(0, 7);
  EXPECT_EQ(memory_.held.count({1, 2}), 1u) << "device 1 may still write there";
  broken(1, 7);
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(group().phase, GroupPhase::kLost);
  EXPECT_EQ(memory_.held.count({1, 2}), 0u);
  EXPECT_EQ(memory_.held.size(), 2u) << "the living keep theirs until they leave";

  registry_.leave(10, 500, members_.at(10));
  EXPECT_EQ(take(), (Lines{"left session=10 request=500"}));
  registry_.session_closed(11, "died");
  EXPECT_EQ(take(), (Lines{"remove device=0 group=1", "remove device=1 group=1"}));
  removed(0);
  EXPECT_TRUE(known());
  removed(1);
  EXPECT_FALSE(known());
  EXPECT_TRUE(memory_.held.empty());
}

TEST_F(Membership, LeavingIsAnsweredWhenTheEngineHasStoppedTheMember) {
  activate(2);
  registry_.leave(11, 501, members_.at(11));
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=1"}));
  stopped(1, 3);
  EXPECT_EQ(take_breaks(),
            (Lines{"left session=11 request=501",
                   "break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=3",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=3"}));
  EXPECT_EQ(break_text_, "rank 1 (session 11, pid 1001) left");
  registry_.leave(11, 502, members_.at(11));
  EXPECT_EQ(take(), (Lines{"refused session=11 request=502 status=NOT_FOUND"}));
}

TEST_F(Membership, ForeignAndStaleMembersCannotBeLeft) {
  activate(2);
  registry_.leave(10, 500, members_.at(10) + 0x10000);
  registry_.leave(10, 501, members_.at(10) + 1);
  registry_.leave(99, 502, members_.at(10));
  EXPECT_EQ(take(), (Lines{"refused session=10 request=500 status=NOT_FOUND",
                           "refused session=10 request=501 status=NOT_FOUND",
                           "refused session=99 request=502 status=NOT_FOUND"}));
  EXPECT_EQ(group().phase, GroupPhase::kActive);
}

TEST_F(Membership, MemberNumbersAreNotReusedWhileAnEngineKnowsThem) {
  activate(1);
  const std::uint32_t first = members_.at(10);
  registry_.leave(10, 500, first);
  stopped(0, 0);
  broken(0, 0);
  take();
  registry_.join(request(0, 1, "next"));
  ready(0, 2);
  take();
  EXPECT_NE(member_index(members_.at(10)), member_index(first));
  removed(0);
  registry_.join(request(0, 1, "third"));
  ready(0, 3);
  take();
  EXPECT_EQ(member_index(members_.at(10)), member_index(first));
  EXPECT_NE(members_.at(10), first) << "another generation";
}

TEST_F(Membership, ALostGroupDoesNotKeepItsName) {
  activate(2);
  registry_.leave(10, 500, members_.at(10));
  take();
  registry_.join(request(0, 2));
  registry_.join(request(1, 2));
  const Lines lines = take();
  EXPECT_EQ(lines, (Lines{"start device=0 group=2 broken=0", "start device=1 group=2 broken=0"}));
}

TEST_F(Membership, AnEvictedRankIsLostLikeOneThatLeft) {
  activate(2);
  registry_.evict(1, 1, "was evicted by operator: too slow");
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=1"}));
  stopped(1, 5);
  take();
  EXPECT_NE(break_text_.find("rank 1 (session 11, pid 1001) was evicted by operator: too slow"),
            std::string::npos)
      << break_text_;
  EXPECT_EQ(group().phase, GroupPhase::kFailing);
  EXPECT_TRUE(group().members.at(1).gone);
}

TEST_F(Membership, AnEvictedRankThatStillJoinsIsRefused) {
  registry_.join(request(0, 3));
  registry_.join(request(1, 3));
  registry_.evict(1, 1, "was evicted by operator");
  take();
  EXPECT_EQ(refusal_.code(), StatusCode::kAborted);
  EXPECT_EQ(refusal_.message(), "rank 1 was evicted by operator");
  EXPECT_EQ(group().members.size(), 1u) << "the other one waits on";
  registry_.join(request(1, 3));
  registry_.join(request(2, 3));
  take();
  ASSERT_EQ(group().phase, GroupPhase::kStarting);
  registry_.evict(1, 2, "was evicted by operator");
  std::size_t refused = 0;
  for (const std::string& line : take()) refused += line.starts_with("refused") ? 1 : 0;
  EXPECT_EQ(refused, 3u) << "all of them, each once";
}

TEST_F(Membership, OperationsThatALivingRankHadNotSubmittedFailAtOnce) {
  activate(3);
  registry_.session_closed(12, "died");
  stopped(2, 9);
  take();
  stopped(0, 9);
  EXPECT_TRUE(take().empty()) << "rank 1 has not been heard of";
  stopped(1, 5);
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=2 fail_from=5",
                           "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=2 fail_from=5"}));
  broken(0, 5);
  broken(1, 5);
  EXPECT_EQ(group().phase, GroupPhase::kLost);
}

TEST_F(Membership, AnEngineThatHasLetGoIsNotBrokenAgain) {
  activate(2);
  registry_.session_closed(11, "died");
  stopped(1, 9);
  take();
  broken(1, 9);
  stopped(0, 5);
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=5"}));
}

TEST_F(Membership, AFurtherLossInAFatalBreakIsAnsweredLikeTheFirst) {
  activate(3);
  registry_.session_closed(12, "died");
  stopped(2, 9);
  take();
  registry_.leave(11, 500, members_.at(11));
  EXPECT_TRUE(take().empty()) << "it has been asked already";
  stopped(1, 9);
  EXPECT_EQ(take(), (Lines{"left session=11 request=500"}));
  registry_.session_closed(10, "died");
  stopped(0, 9);
  broken(0, 9);
  broken(1, 9);
  EXPECT_EQ(take(), (Lines{"remove device=0 group=1", "remove device=1 group=1"}));
}

TEST_F(Membership, RanksThatDieTogetherGiveOneBreakFromTheLowest) {
  activate(4);
  registry_.session_closed(12, "died");
  registry_.session_closed(13, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=0 group=1 rank=2", "stop_member device=1 group=1 rank=3"}));
  stopped(2, 8);
  EXPECT_TRUE(take().empty());
  stopped(3, 6);
  EXPECT_EQ(take_breaks(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=2 fail_from=6",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=2 fail_from=6"}));
}

// An engine that is stopped is not killed; its joiners wait no longer than they asked for.
TEST_F(Membership, AGroupWhoseEngineIsSilentDoesNotStartForEver) {
  for (const std::uint32_t timeout_ms : {500u, 20'000u}) {
    const std::uint64_t id = timeout_ms == 500 ? 1 : 2;
    for (const std::uint32_t rank : {0u, 1u}) {
      JoinRequest joins = request(rank, 2);
      joins.join.timeout_ms = timeout_ms;
      registry_.join(joins);
    }
    take();
    ready(0, id);
    // The limits' engine_ack_ms, if nobody is willing to wait for longer.
    clock_.advance_ms(timeout_ms == 500 ? 2'999 : 19'999);
    registry_.tick();
    for (const std::string& line : take()) EXPECT_EQ(line.find("refused"), std::string::npos) << line;
    clock_.advance_ms(1);
    EXPECT_LE(registry_.next_due_ns(), clock_.now_ns());
    registry_.tick();
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
  registry_.session_closed(10, "died");
  registry_.session_closed(11, "died");
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
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=0 cause=DEADLINE_EXCEEDED culprit=1",
                           "break device=1 group=1 epoch=1 fatal=0 cause=DEADLINE_EXCEEDED culprit=1"}));
  EXPECT_EQ(break_text_, "rank 1 did not come");
  request_break(0);  // a second one for the same epoch
  broken(0, 12);
  EXPECT_TRUE(take().empty());
  broken(1, 10);
  EXPECT_EQ(take(),
            (Lines{"resume device=0 group=1 epoch=2 index=10", "resume device=1 group=1 epoch=2 index=10"}));
  EXPECT_EQ(group().phase, GroupPhase::kActive);
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
  EXPECT_EQ(group().phase, GroupPhase::kBreaking);
}

TEST_F(Membership, ARankLostInARecoverableBreakTurnsItFatal) {
  activate(2);
  request_break(0);
  take();
  registry_.session_closed(11, "died");
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=1"}));
  stopped(1, 6);
  broken(0, 4);
  EXPECT_TRUE(take().empty()) << "each kBroken answers one kBreak";
  broken(1, 4);
  EXPECT_EQ(take_breaks(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=6",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=6"}));
  broken(0, 6);
  broken(1, 6);
  EXPECT_EQ(group().phase, GroupPhase::kLost);
}

TEST_F(Membership, ABreakRequestInAFatalBreakFailsEverything) {
  activate(2);
  registry_.session_closed(11, "died");
  stopped(1, 6);
  take();
  request_break(0);
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=0",
                           "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=0"}));
}

// ---- engines that die

TEST_F(Membership, ADeadEngineBreaksTheOthersAndGoesOnWhereBoardsSay) {
  activate(4);  // ranks 0, 2 on device 0; 1, 3 on device 1
  registry_.engine_down(0, "the engine of host:0 died");
  EXPECT_EQ(take(), (Lines{"break device=1 group=1 epoch=1 fatal=0 cause=ENGINE_RESTARTED culprit=-1"}));
  broken(1, 9);
  EXPECT_TRUE(take().empty());
  registry_.engine_up(0);
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=1"}));
  memory_.board_index[{1, 0}] = 8;
  memory_.board_index[{1, 2}] = 7;
  ready(0);
  EXPECT_EQ(take(),
            (Lines{"resume device=0 group=1 epoch=2 index=7", "resume device=1 group=1 epoch=2 index=7"}));
  EXPECT_TRUE(memory_.lost.empty());
}

TEST_F(Membership, AnEngineThatDiesAgainBeforeItIsReadyIsToldAgain) {
  activate(2);
  registry_.engine_down(0, "died");
  registry_.engine_up(0);
  take();
  registry_.engine_down(0, "died again");
  EXPECT_TRUE(take().empty());
  broken(1, 0);
  registry_.engine_up(0);
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=1"}));
  ready(0);
  EXPECT_EQ(take().size(), 2u);
}

TEST_F(Membership, AllEnginesDeadStillResume) {
  activate(2);
  registry_.engine_down(0, "died");
  registry_.engine_down(1, "died");
  take();
  registry_.engine_up(1);
  registry_.engine_up(0);
  memory_.board_index[{1, 0}] = 3;
  memory_.board_index[{1, 1}] = 2;
  ready(1);
  take();
  ready(0);
  EXPECT_EQ(take(),
            (Lines{"resume device=0 group=1 epoch=2 index=2", "resume device=1 group=1 epoch=2 index=2"}));
}

TEST_F(Membership, AGroupThatStartsWaitsForARestartedEngine) {
  registry_.join(request(0, 2));
  registry_.join(request(1, 2));
  take();
  registry_.engine_down(1, "died");
  ready(0);
  EXPECT_TRUE(take().empty());
  registry_.engine_up(1);
  EXPECT_EQ(take(), (Lines{"start device=1 group=1 broken=0"}));
  ready(1);
  EXPECT_EQ(take().size(), 2u);
  EXPECT_EQ(group().epoch, 1u);
}

TEST_F(Membership, AGroupFormedWhileAnEngineIsDownStartsWhenItIsBack) {
  registry_.engine_down(1, "died");
  registry_.join(request(0, 2));
  registry_.join(request(1, 2));
  EXPECT_EQ(take(), (Lines{"start device=0 group=1 broken=0"}));
  ready(0);
  registry_.engine_up(1);
  EXPECT_EQ(take(), (Lines{"start device=1 group=1 broken=0"}));
}

TEST_F(Membership, ARankThatDiesWithItsEngineFailsFromItsBoard) {
  activate(3);  // rank 1 alone on device 1
  registry_.engine_down(1, "died");
  take();
  memory_.board_index[{1, 1}] = 4;
  registry_.session_closed(11, "died");
  EXPECT_TRUE(take().empty()) << "device 0 still owes the kBroken of the recoverable break";
  broken(0, 5);
  EXPECT_EQ(take_breaks(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=4"}));
  broken(0, 5);
  EXPECT_EQ(group().phase, GroupPhase::kLost);
  registry_.engine_up(1);
  EXPECT_TRUE(take().empty()) << "a lost group is not told to a new engine";
}

TEST_F(Membership, AnEngineThatDiesInAFatalBreakLeavesItsBoardsToTheSupervisor) {
  activate(3);
  registry_.session_closed(11, "died");
  stopped(1, 2);
  take();
  memory_.board_index[{1, 0}] = memory_.board_index[{1, 2}] = 1;
  registry_.engine_down(0, "died");
  EXPECT_EQ(take(), (Lines{"wake session=10", "wake session=12",
                           "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=1"}))
      << "what the dead engine had taken of its ranks beyond their boards fails";
  EXPECT_EQ(memory_.lost.at(0), "rank 1 (session 11, pid 1001) died");
  EXPECT_EQ(memory_.lost.count(2), 1u);
  broken(1, 2);
  EXPECT_EQ(group().phase, GroupPhase::kLost);
  registry_.leave(10, 500, members_.at(10));
  registry_.leave(12, 501, members_.at(12));
  EXPECT_EQ(take(),
            (Lines{"left session=10 request=500", "left session=12 request=501", "remove device=1 group=1"}))
      << "the dead engine has nothing to forget";
  removed(1);
  EXPECT_FALSE(known());
}

TEST_F(Membership, AnEngineThatDiesBeforeItStopsAMemberIsAnsweredForFromTheBoard) {
  activate(2);
  memory_.board_index[{1, 1}] = 11;
  registry_.leave(11, 500, members_.at(11));
  take();
  registry_.engine_down(1, "died");
  EXPECT_EQ(take_breaks(),
            (Lines{"left session=11 request=500",
                   "break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=11"}));
}

TEST_F(Membership, AnEngineThatDiesWhileItForgetsHasForgotten) {
  activate(2);
  registry_.session_closed(10, "died");
  registry_.session_closed(11, "died");
  stopped(0, 0);
  stopped(1, 0);
  broken(0, 0);
  broken(1, 0);
  removed(0);
  registry_.engine_down(1, "died");
  EXPECT_FALSE(known());
  EXPECT_TRUE(memory_.held.empty());
}

TEST_F(Membership, ARestartedEngineThatCannotServeTheGroupEndsIt) {
  activate(2);
  registry_.engine_down(0, "died");
  broken(1, 3);
  registry_.engine_up(0);
  take();
  registry_.group_ready(0, {1, StatusCode::kInternal, "arena lost"});
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=INTERNAL culprit=-1 fail_from=0",
                           "break device=1 group=1 epoch=1 fatal=1 cause=INTERNAL culprit=-1 fail_from=0"}));
}

// ---- engines that do not answer

TEST_F(Membership, AnUnansweredStopKillsTheEngine) {
  activate(2);
  registry_.session_closed(11, "died");
  take();
  clock_.advance_ms(2'999);
  registry_.tick();
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 1'000'000);
  clock_.advance_ms(1);
  registry_.tick();
  EXPECT_EQ(take(), (Lines{"kill device=1"}));
  registry_.engine_down(1, "killed");
  EXPECT_EQ(take_breaks(),
            (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=0"}));
}

// The supervisor does not kill a stopped engine. What its rank had submitted can't be known then.
TEST_F(Membership, AnEngineThatIsStoppedDoesNotKeepTheOthersFromTheFatalBreak) {
  activate(2);
  registry_.leave(11, 500, members_.at(11));
  take();
  clock_.advance_ms(3'000);
  registry_.tick();
  EXPECT_EQ(take(), (Lines{"kill device=1"}));
  clock_.advance_ms(3'000);
  registry_.tick();
  EXPECT_EQ(take_breaks(),
            (Lines{"kill device=1", "left session=11 request=500",
                   "break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=0",
                   "break device=1 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=0"}));
  broken(0, 0);
  stopped(1, 4);  // it goes on
  broken(1, 4);
  EXPECT_EQ(group().phase, GroupPhase::kLost);
}

TEST_F(Membership, AnUnansweredRecoverableBreakReleasesTheOthersThenKillsTheEngineAgainAndAgain) {
  activate(2);
  request_break(0);
  broken(0, 0);
  take();
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 1'000'000'000) << "a third of engine_ack_ms";
  clock_.advance_ms(1'000);
  registry_.tick();
  EXPECT_EQ(take(), (Lines{"release device=0 group=1"}));
  for (int turn = 0; turn < 3; ++turn) {
    clock_.advance_ms(turn == 0 ? 2'000 : 3'000);
    registry_.tick();
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
  registry_.tick();
  EXPECT_TRUE(take().empty());
  broken(0, 0);
  EXPECT_EQ(take(), (Lines{"release device=0 group=1"}));
  registry_.tick();
  EXPECT_TRUE(take().empty());
  EXPECT_EQ(registry_.next_due_ns(), clock_.now_ns() + 2'000'000'000);
}

TEST_F(Membership, AFatalBreakHasTimeForRunningOperationsThenFailsThemThenKills) {
  activate(2);
  registry_.session_closed(11, "died");
  stopped(1, 4);
  stopped(0, 4);
  take();
  broken(1, 4);
  clock_.advance_ms(3'000);
  registry_.tick();
  EXPECT_TRUE(take().empty()) << "operations below 4 may still run";
  clock_.advance_ms(30'000);
  registry_.tick();
  EXPECT_EQ(take(), (Lines{"break device=0 group=1 epoch=1 fatal=1 cause=RANK_LOST culprit=1 fail_from=0"}));
  clock_.advance_ms(3'000);
  registry_.tick();
  EXPECT_EQ(take(), (Lines{"kill device=0"}));
}

TEST_F(Membership, AnUnansweredCommitAndRemovalKillTheEngine) {
  registry_.join(request(0, 2));
  registry_.join(request(1, 2));
  take();
  ready(0);
  clock_.advance_ms(10'000);
  registry_.tick();
  EXPECT_EQ(take(), (Lines{"kill device=1"}));
  registry_.engine_down(1, "killed");
  registry_.session_closed(10, "died");
  EXPECT_EQ(take(), (Lines{"refused session=11 request=101 status=RANK_LOST", "remove device=0 group=1"}));
  clock_.advance_ms(3'000);
  registry_.tick();
  EXPECT_EQ(take(), (Lines{"kill device=0"}));
  registry_.engine_down(0, "killed");
  EXPECT_FALSE(known());
}

}  // namespace
}  // namespace epd::membership
