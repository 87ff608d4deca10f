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
    const std::uint32_t number = ringers_[0].ring(kNoopProgram, 0, group_->epoch, flagged);
    ASSERT_TRUE(ringers_[0].ended(number));
    EXPECT_TRUE(!flagged || group_->words(0).flags[kNoopProgram] == 1);
  }
  run_and_check(1);
}

// The journal's 1024 entries come round more than twice.
TEST_F(EngineCommandsTest, TheJournalIsReadAsItFills) {
  for (std::uint32_t i = 0; i < 2500; ++i) {
    const std::uint32_t number = ringers_[1].ring(kNoopProgram, 0, group_->epoch);
    ASSERT_TRUE(i % 32 != 31 || ringers_[1].ended(number)) << i;
  }
  run_and_check(0);
}

TEST_F(EngineCommandsTest, APrograMayBeRecordedAgainButNotOtherwise) {
  EXPECT_EQ(record(0, Op::kDispatch, 1, dispatch_on(1)), StatusCode::kOk);
  run_and_check(1);
  session(0).submit(program(0, Op::kCombine, 1, dispatch_on(1)));
  expect_session_ended(0, "handle is 1, a program that was recorded otherwise");
}

TEST_F(EngineCommandsTest, ProgramsAreNumberedBelowTheirMost) {
  session(1).submit(program(1, Op::kDispatch, 1, 64));
  expect_session_ended(1, "handle is 64; allowed: 0 .. 63");
}

TEST_F(EngineCommandsTest, WhoRingsSubmitsNothingElse) {
  session(0).submit(submission(0, Op::kNoop, 0));
  EXPECT_EQ(session(0).wait()->status, StatusCode::kOk);
  session(0).submit(submission(0, Op::kDispatch, 0));
  expect_session_ended(0, "flags is 0; allowed: with kFlagRecord");
}

TEST_F(EngineCommandsTest, WhoSubmitsRecordsNothing) {
  session(2).submit(program(2, Op::kDispatch, 0, 0));
  expect_session_ended(2, "flags is 512; allowed: without kFlagRecord");
}

TEST_F(EngineCommandsTest, IllegalCommandsEndTheSession) {
  ringers_[0].ring(30, 0, group_->epoch);
  expect_session_ended(0, "program is 30; allowed: one that was recorded");
  ringers_[1].ring(dispatch_on(0), kShape.max_tokens + 1, group_->epoch);
  expect_session_ended(1, "num_tokens is 10; allowed: 0 .. 9");
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
