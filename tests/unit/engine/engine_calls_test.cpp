// Calls: operations that streams and hosts ask for, and what a client may enqueue.

#include "engine_calls_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

using EngineCallsTest = EngineCallsFixture;

TEST_F(EngineCallsTest, CallsOfStreamsAndHostsMatchTheReference) {
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

TEST_F(EngineCallsTest, NoopsEndAndHaveNoNumber) {
  for (int i = 0; i < 200; ++i) {
    const bool flagged = random_() % 2 != 0;
    const std::uint32_t number = ringers_[0].ring(kNoopCall, 0, group_->epoch, flagged);
    ASSERT_TRUE(ringers_[0].ended(number));
    EXPECT_TRUE(!flagged || group_->words(0).flags[kNoopFlag] == 1);
  }
  run_and_check(1);
}

// The journal's 1024 entries come round more than twice.
TEST_F(EngineCallsTest, TheJournalIsReadAsItFills) {
  for (std::uint32_t i = 0; i < 2500; ++i) {
    const std::uint32_t number = ringers_[1].ring(kNoopCall, 0, group_->epoch);
    ASSERT_TRUE(i % 32 != 31 || ringers_[1].ended(number)) << i;
  }
  run_and_check(0);
}

// No two of them alike, and more of them than the ring has places.
TEST_F(EngineCallsTest, CallsMayDifferWithoutLimit) {
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
    await_ends(slot, numbers);
    if (HasFatalFailure()) return;
    check_rows(slot, inputs);
  }
}

TEST_F(EngineCallsTest, WhoCallsSubmitsNothing) {
  session(0).submit(submission(0, Op::kNoop, 0));
  expect_session_ended(0, "op is 1; allowed: none, since this rank's operations are calls");
  session(2).submit(submission(2, Op::kDispatch, 0));
  expect_session_ended(2, "op is 2; allowed: none");
}

TEST_F(EngineCallsTest, IllegalCommandsEndTheSession) {
  ringers_[0].ring(dispatch_on(15), 0, group_->epoch);
  expect_session_ended(0, "call field slot is 15; allowed: 0 .. " + std::to_string(kShape.depth - 1));
  ringers_[1].ring(dispatch_on(0), kShape.max_tokens + 1, group_->epoch);
  expect_session_ended(1, "call field num_tokens is 10; allowed: 0 .. 9");
  ring(2, dispatch_on(14));
  expect_session_ended(2, "call field slot is 14");
}

// Each field that a client may get wrong, by itself.
TEST_F(EngineCallsTest, WhatNoLibraryAsksForIsNamed) {
  abi::Call call = combine_on(1);
  switch (random_() % 6) {
    case 5:
      call = dispatch_on(1);
      call.flags |= 3u << abi::kFormatShift;
      ringers_[0].ring(call, 0, group_->epoch);
      expect_session_ended(0, "call field row format in flags is 3; allowed: 0 .. 0");
      break;
    case 0:
      call.flags = 1u << 8;
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

TEST_F(EngineCallsTest, PlacesOfACallWithoutAStreamAreNamed) {
  abi::Call call = combine_on(1);
  call.flags = abi::kFlagPlaces;
  ring(2, call);
  expect_session_ended(2,
                       "call field flags is 1024; allowed: no places of rows, which calls of streams have");
}

// A later call lies where the next one was.
TEST_F(EngineCallsTest, ACommandThatWasOverwrittenEndsTheSession) {
  run_and_check(0);
  abi::CallWords& words = group_->words(1);
  const std::uint32_t next = words.tail;
  words.tail += abi::kCallSlots;
  const std::uint32_t late = ringers_[1].ring(dispatch_on(0), 0, group_->epoch);
  expect_session_ended(
      1, "number is " + std::to_string(late) + "; allowed: " + std::to_string(next) + ", since");
  EXPECT_TRUE(ringers_[1].ended(late));
  EXPECT_EQ(ringers_[1].failed(), abi::kCallSlots + 1);
}

}  // namespace
}  // namespace epd::test
