// Commands: operations that streams ask for, and what a client may record and ring.

#include "engine_commands_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

using EngineCommandsTest = EngineCommandsFixture;

TEST_F(EngineCommandsTest, CommandsAndSubmissionsOfOneGroupMatchTheReference) {
  for (std::uint32_t i = 0; i < 100; ++i) {
    run_and_check(i % kShape.depth);
    if (HasFatalFailure()) return;
  }
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(ringers_[rank].failed(), 0u);
    EXPECT_TRUE(comes([&] { return group_->board(rank).next_index.load() == next_; }))
        << group_->board(rank).next_index.load();
  }
}

TEST_F(EngineCommandsTest, NoopsEndAndHaveNoNumber) {
  for (int i = 0; i < 200; ++i) {
    const bool flagged = random_() % 2 != 0;
    const std::uint32_t number = ringers_[0].ring(kNoopCall, 0, group_->epoch, flagged);
    ASSERT_TRUE(ringers_[0].ended(number));
    EXPECT_TRUE(!flagged || group_->words(0).flags[kNoopFlag] == 1);
  }
  run_and_check(1);
}

// The journal's 1024 entries come round more than twice.
TEST_F(EngineCommandsTest, TheJournalIsReadAsItFills) {
  for (std::uint32_t i = 0; i < 2500; ++i) {
    const std::uint32_t number = ringers_[1].ring(kNoopCall, 0, group_->epoch);
    ASSERT_TRUE(i % 32 != 31 || ringers_[1].ended(number)) << i;
  }
  run_and_check(0);
}

// No two of them alike, and more of them than the ring has places.
TEST_F(EngineCommandsTest, CallsMayDifferWithoutLimit) {
  for (std::uint32_t i = 0; i < 100; ++i) {
    const std::uint32_t slot = i % kShape.depth;
    const auto inputs = fill(slot);
    std::vector<std::uint32_t> numbers(kRanks);
    for (const std::uint32_t rank : {0u, 1u}) {
      abi::Call call = dispatch_on(slot);
      call.timeout_ms = 20'000 + i;
      call.sms = i % 7;
      numbers[rank] = ringers_[rank].ring(call, inputs[rank].num_tokens, group_->epoch);
    }
    abi::Submission s = submission(2, Op::kDispatch, slot);
    s.num_tokens = inputs[2].num_tokens;
    session(2).submit(s);
    await_ends(slot, numbers);
    if (HasFatalFailure()) return;
    check_rows(slot, inputs);
  }
}

TEST_F(EngineCommandsTest, WhoRingsSubmitsNothingElse) {
  session(0).submit(submission(0, Op::kNoop, 0));
  EXPECT_EQ(session(0).wait()->status, StatusCode::kOk);
  session(0).submit(submission(0, Op::kDispatch, 0));
  expect_session_ended(0, "op is 2; allowed: 1 (noop) outside of streams");
}

TEST_F(EngineCommandsTest, IllegalCommandsEndTheSession) {
  ringers_[0].ring(dispatch_on(15), 0, group_->epoch);
  expect_session_ended(0, "call field slot is 15; allowed: 0 .. " + std::to_string(kShape.depth - 1));
  ringers_[1].ring(dispatch_on(0), kShape.max_tokens + 1, group_->epoch);
  expect_session_ended(1, "call field num_tokens is 10; allowed: 0 .. 9");
}

// Each field that a client may get wrong, by itself.
TEST_F(EngineCommandsTest, WhatNoLibraryAsksForIsNamed) {
  abi::Call call = combine_on(1);
  switch (random_() % 5) {
    case 0:
      call.flags = abi::kFlagStream;
      ringers_[0].ring(call, 0, group_->epoch);
      expect_session_ended(0, "call field flags is 256");
      break;
    case 1:
      call.flags = abi::kFlagCached;
      ringers_[0].ring(call, 0, group_->epoch);
      expect_session_ended(0, "call field flags is 2; allowed: the bits of");
      break;
    case 2:
      call.route = 4000;
      ringers_[0].ring(call, 0, group_->epoch);
      expect_session_ended(0, "call field route is 4000; allowed: 0 .. ");
      break;
    case 3:
      call.op = Op::kNone;
      ringers_[0].ring(call, 0, group_->epoch);
      expect_session_ended(0, "call field op is 0; allowed: 1 (noop), 2 (dispatch), 3 (combine)");
      break;
    default:
      ringers_[0].ring(call, 1, group_->epoch);
      expect_session_ended(0, "call field num_tokens is 1; allowed: 0, the routing's own counts");
  }
}

// A later command lies where the next one was.
TEST_F(EngineCommandsTest, ACommandThatWasOverwrittenEndsTheSession) {
  run_and_check(0);
  abi::CommandWords& words = group_->words(1);
  const std::uint32_t next = words.tail;
  words.tail += abi::kCommandSlots;
  const std::uint32_t late = ringers_[1].ring(dispatch_on(0), 0, group_->epoch);
  expect_session_ended(
      1, "number is " + std::to_string(late) + "; allowed: " + std::to_string(next) + ", since");
  EXPECT_TRUE(ringers_[1].ended(late));
  EXPECT_EQ(ringers_[1].failed(), abi::kCommandSlots + 1);
}

// Devices without a kernel that stays. The supervisor refuses such a join before.
class EngineWithoutCommands : public ::testing::TestWithParam<const char*> {};

TEST_P(EngineWithoutCommands, SaysSo) {
  EngineThread engine(0, GetParam(), false);
  engine.start();
  RawSession session(10);
  session.add_to(engine);
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  RawGroup group(9, shape, GetParam());
  group.commands = {1};
  group.announce({&engine}, {&session}, 0, false);
  const auto ready = engine.expect(LinkType::kGroupReady);
  ASSERT_TRUE(ready.has_value());
  const auto body = ready->read<abi::GroupReady>().value();
  EXPECT_EQ(body.status, StatusCode::kUnsupported);
  const std::string text(body.text);
  for (const std::string part : {"commands is 1 (by stream) on ", GetParam(), "devices.mode", "\"resident\""})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  engine.send(LinkType::kRemoveGroup, abi::GroupRef{9});
  EXPECT_TRUE(engine.expect(LinkType::kGroupRemoved).has_value());
  EXPECT_EQ(engine.stop(), 0);
}

INSTANTIATE_TEST_SUITE_P(Devices, EngineWithoutCommands, ::testing::Values("host", "cuda"));

}  // namespace
}  // namespace epd::test
