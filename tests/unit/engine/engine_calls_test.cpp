// Calls: operations that streams and hosts ask for, and what a client may enqueue.

#include "engine_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

using EngineCallsTest = EngineOfEachKind;
INSTANTIATE_TEST_SUITE_P(Kinds, EngineCallsTest, kinds(), kind_name);

TEST_P(EngineCallsTest, CallsOfStreamsAndHostsMatchTheReference) {
  for (std::uint32_t i = 0; i < 100; ++i) {
    run_and_check(i % kShape.depth);
    if (HasFatalFailure()) return;
  }
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    EXPECT_EQ(ringers_[rank].failed(), 0u);
    EXPECT_TRUE(comes([&] { return group_->board(rank).next_index.load() == next_; }))
        << group_->board(rank).next_index.load();
  }
}

TEST_P(EngineCallsTest, NoopsEndAndHaveNoNumber) {
  for (int i = 0; i < 200; ++i) {
    const bool flagged = random_() % 2 != 0;
    const std::uint32_t number = ringers_[0].ring(kNoopCall, 0, group_->epoch, flagged);
    ASSERT_TRUE(ringers_[0].ended(number));
    EXPECT_TRUE(!flagged || !by_stream(0) || group_->words(0).flags[kNoopFlag] == 1);
  }
  run_and_check(1);
}

// The journal's 1024 entries come round more than twice.
TEST_P(EngineCallsTest, TheJournalIsReadAsItFills) {
  for (std::uint32_t i = 0; i < 2500; ++i) {
    const std::uint32_t number = ringers_[1].ring(kNoopCall, 0, group_->epoch);
    ASSERT_TRUE(i % 32 != 31 || ringers_[1].ended(number)) << i;
  }
  run_and_check(0);
}

// No two of them alike, and more of them than the ring has places.
TEST_P(EngineCallsTest, CallsMayDifferWithoutLimit) {
  for (std::uint32_t i = 0; i < 100; ++i) {
    const std::uint32_t slot = i % kShape.depth;
    const auto inputs = fill(slot);
    std::vector<std::uint32_t> numbers(kRanks);
    for (const std::uint32_t rank : {0u, 1u, 2u}) {
      abi::Call call = dispatch_on(slot);
      call.timeout_ms = 20'000 + i;
      call.sms = i % 7;
      numbers[rank] = ringers_[rank].ring(call, inputs[rank].num_tokens, group_->epoch);
    }
    await_ends(numbers);
    if (HasFatalFailure()) return;
    check_rows(slot, inputs);
  }
}

// A group of one rank, beside the fixture's.
struct OneRank {
  OneRank(EngineThread& engine, std::uint64_t id, const std::string& kind, std::uint32_t max_recv_rows = 0)
      : session(id), group(id, shape_of(max_recv_rows), kind) {
    session.add_to(engine);
    group.add_to_engine({&engine}, {&session}, 0, false);
  }
  static abi::GroupShape shape_of(std::uint32_t max_recv_rows) {
    abi::GroupShape shape = kShape;
    shape.num_ranks = 1;
    shape.max_recv_rows = max_recv_rows;
    return shape;
  }

  RawSession session;
  const RawGroup group;
  Ringer ringer = group.host_ringer(0, session);
};

// Each field that a client may get wrong, by itself.
TEST_P(EngineCallsTest, EachIllegalFieldEndsOnlyItsSession) {
  struct Case {
    const char* word;
    void (*spoil)(abi::Call&);
    std::uint32_t num_tokens = 0;
  };
  const Case cases[] = {
      {"op is 0; allowed: 1 (noop), 2 (dispatch), 3 (combine)", [](abi::Call& c) { c.op = Op::kNone; }},
      {"slot is 15; allowed: 0 .. 1", [](abi::Call& c) { c.slot = 15; }},
      {"num_tokens is 10; allowed: 0 .. 9", [](abi::Call&) {}, 10},
      {"num_tokens is 1; allowed: 0, the routing's own counts", [](abi::Call& c) { c.op = Op::kCombine; }, 1},
      {"num_tokens is 1; allowed: 0", [](abi::Call& c) { c.flags = abi::kFlagCached; }, 1},
      {"flags is 256", [](abi::Call& c) { c.op = Op::kCombine, c.flags = 1u << 8; }},
      {"flags is 2; allowed: the bits of",
       [](abi::Call& c) { c.op = Op::kCombine, c.flags = abi::kFlagCached; }},
      {"flags is 16", [](abi::Call& c) { c.flags = abi::kFlagReturnWeights; }},
      {"flags is 1024; allowed: no places of rows, which calls of streams have",
       [](abi::Call& c) { c.op = Op::kCombine, c.flags = abi::kFlagPlaces; }},
      {"biases in flags is 1", [](abi::Call& c) { c.op = Op::kCombine, c.flags = 1u << abi::kBiasShift; }},
      {"row format in flags is 3; allowed: 0 .. 0", [](abi::Call& c) { c.flags = 3u << abi::kFormatShift; }},
      {"flags is 2048", [](abi::Call& c) { c.op = Op::kCombine, c.flags = 1u << abi::kFormatShift; }},
      {"route is 4000; allowed: 0 .. 1", [](abi::Call& c) { c.route = 4000; }},
      {"route is 1; allowed: the slot", [](abi::Call& c) { c.route = 1; }},
  };
  std::uint64_t id = 100;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.word);
    OneRank bad(*engine_view_[0], ++id, GetParam());
    abi::Call call = dispatch_on(0);
    c.spoil(call);
    const std::uint32_t number = bad.ringer.ring(call, c.num_tokens, 1);
    const auto failed = engine_view_[0]->expect(LinkType::kSessionFailed);
    ASSERT_TRUE(failed.has_value());
    EXPECT_EQ(failed->read<abi::SessionFailed>().value().session_id, id);
    const std::string text = bad.session.b().message;
    EXPECT_NE(text.find(std::string("call field ") + c.word), std::string::npos) << text;
    EXPECT_TRUE(bad.ringer.ended(number));
    EXPECT_EQ(bad.ringer.failed(), 1u);
  }
  run_and_check(0);
}

TEST_P(EngineCallsTest, MoreRowsThanRoomIsNamed) {
  OneRank small(*engine_view_[0], 300, GetParam(), 4);
  small.ringer.ring(dispatch_on(0), 5, 1);
  const std::string text = break_asked(0, StatusCode::kResourceExhausted, 0);
  EXPECT_NE(text.find("rank 0 would receive 5 rows; allowed: max_recv_rows = 4"), std::string::npos) << text;
}

// Other rows on the other slot, whose choices are nonsense that nobody may read.
TEST_P(EngineCallsTest, ACachedDispatchUsesTheRoutingOfAnother) {
  auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  ASSERT_FALSE(HasFatalFailure());
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    for (std::uint8_t& byte : inputs[rank].x) byte = static_cast<std::uint8_t>(random_() & 0x3f);
    std::copy(inputs[rank].x.begin(), inputs[rank].x.end(),
              group_->region<std::uint8_t>(rank, 1, Region::kX));
    std::fill_n(group_->region<std::int32_t>(rank, 1, Region::kTopkIdx), 18, 99);
  }
  abi::Call again = dispatch_on(1);
  again.flags = abi::kFlagCached;
  again.route = 0;
  await_ends(ask(again, inputs));
  ASSERT_FALSE(HasFatalFailure());
  check_rows(1, inputs);
  const auto answers = answer(1, inputs);
  abi::Call combine = combine_on(1);
  combine.route = 0;
  await_ends(ask(combine, inputs));
  check_sums(1, inputs, answers);
}

// The combine of slot 1 waits for rank 2 while the next dispatches, which renew its record, are enqueued.
TEST_P(EngineCallsTest, ADispatchOnARecordLeavesTheCombineBeforeItAlone) {
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  ASSERT_FALSE(HasFatalFailure());
  const auto answers = answer(0, inputs);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank)
    std::copy(answers[rank].y.begin(), answers[rank].y.end(),
              group_->region<std::uint16_t>(rank, 1, Region::kY));
  const auto others = fill(0);
  abi::Call combine = combine_on(1);
  combine.route = 0;
  std::vector<std::uint32_t> last(kRanks);
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    ring(rank, combine);
    last[rank] = ring(rank, dispatch_on(0), others[rank].num_tokens);
  }
  ++next_;
  await_ends(last);
  check_sums(1, inputs, answers);
  check_rows(0, others);
}

// A later call lies where the next one was.
TEST_P(EngineCallsTest, ACallThatWasOverwrittenEndsTheSession) {
  run_and_check(0);
  const std::uint32_t next = ringers_[1].tail();
  ringers_[1].skip(abi::kCallSlots);
  const std::uint32_t late = ringers_[1].ring(dispatch_on(0), 0, group_->epoch);
  expect_session_ended(
      1, "number is " + std::to_string(late) + "; allowed: " + std::to_string(next) + ", since");
  EXPECT_TRUE(ringers_[1].ended(late));
  EXPECT_EQ(ringers_[1].failed(), abi::kCallSlots + 1);
}

}  // namespace
}  // namespace epd::test
