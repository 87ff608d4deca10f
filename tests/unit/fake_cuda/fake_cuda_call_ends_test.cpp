// All the ways in which calls end, on the fake driver.
#include "unit/fake_cuda/fake_cuda_call_world.h"

#include "proto/arena.h"

#include <algorithm>

namespace epd::fake_cuda_test {
namespace {

constexpr std::uint32_t kTokens = 12;

// One rank, unless a test says else.
class FakeCudaCallEnds : public ::testing::Test {
 protected:
  void make(std::uint32_t ranks) {
    Case c;
    c.group.num_ranks = ranks;
    c.group.num_experts = ranks * 4;
    c.group.hidden = 256;
    c.group.topk = 4;
    calls_ = std::make_unique<CallWorld>(shape_of(c, std::uint64_t{ranks} * kTokens), kTokens);
    for (std::uint32_t r = 0; r < ranks; ++r) {
      for (std::size_t i = 0; i < std::size_t{kTokens} * 4; ++i)
        choices(r)[i] = static_cast<std::int64_t>(i % (std::size_t{ranks} * 4));
    }
  }
  void TearDown() override {
    for (std::uint32_t r = 0; calls_ != nullptr && r < calls_->size(); ++r) calls_->close(r);
  }
  void start(std::uint32_t ranks = 1) {
    make(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) calls_->open(r);
    for (std::uint32_t r = 0; r < ranks; ++r) calls_->resume(r, {});
  }
  std::int64_t* choices(std::uint32_t r) { return static_cast<std::int64_t*>(calls_->rank(r).topk_idx); }
  CallWords& words(std::uint32_t r = 0) { return *calls_->own(r).words; }
  void ring(const abi::Call& call, std::uint32_t num_tokens = 0, bool flagged = false) {
    CallWorld::Ring how;
    how.num_tokens = num_tokens;
    how.flagged = flagged;
    calls_->ring(0, call, how);
    calls_->synchronise(0);
  }
  // The next end is this error, nothing is carried out after it, and all is well in the next enabled epoch.
  JournalEntry refused(OpError error) {
    const JournalEntry entry = calls_->journal(0);
    EXPECT_EQ(entry.result.error, error);
    EXPECT_EQ(entry.result.tag, 0u);
    const std::uint32_t failed = now(words().failed);
    const std::uint32_t done = now(words().done);
    ring(CallWorld::noop(), 0, true);
    EXPECT_EQ(now(words().failed), failed + 1);
    EXPECT_EQ(now(words().done), done + 1);
    EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kNoop, 0)]), 1u);
    return entry;
  }

  std::unique_ptr<CallWorld> calls_;
};

TEST_F(FakeCudaCallEnds, HaltedAtFirstItDiscards) {
  make(1);
  calls_->open(0);
  ring(calls_->dispatch(0), 3, true);
  ring(CallWorld::noop());
  EXPECT_EQ(now(words().done), 2u);
  EXPECT_EQ(now(words().failed), 2u);
  EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]), 1u);
  calls_->resume(0, {});
  ring(calls_->dispatch(0), 3);
  const JournalEntry entry = calls_->journal(0);
  EXPECT_EQ(entry.result.error, OpError::kNone);
  EXPECT_EQ(entry.result.tag, abi::op_tag(1, 0));
  EXPECT_EQ(entry.result.num_recv_rows, 3u);
  EXPECT_EQ(abi::unpack(entry.call).number, 2u);
  EXPECT_EQ(now(words().failed), 2u);
  calls_->halt(0);
  ring(calls_->dispatch(0), 3);
  EXPECT_EQ(now(words().failed), 3u);
}

TEST_F(FakeCudaCallEnds, TokensMayBeKnownOnlyToTheDevice) {
  start();
  std::uint32_t* const at = calls_->own(0).arena->take<std::uint32_t>(1);
  for (const std::uint32_t tokens : {5u, 0u, kTokens}) {
    *at = tokens;
    CallWorld::Ring how;
    how.num_tokens_at = at;
    calls_->ring(0, calls_->dispatch(1), how);
    EXPECT_EQ(abi::unpack(calls_->journal(0).call).num_tokens, tokens);
  }
  *at = 1u << 20;  // more than a call can state
  CallWorld::Ring how;
  how.num_tokens_at = at;
  calls_->ring(0, calls_->dispatch(1), how);
  EXPECT_EQ(abi::unpack(refused(OpError::kBadCall).call).num_tokens, abi::kMostCommandTokens);
}

TEST_F(FakeCudaCallEnds, WhatIsIllegalIsRefusedAndOthersDiscarded) {
  start();
  ring(calls_->dispatch(0), kTokens + 1, true);
  EXPECT_EQ(abi::unpack(refused(OpError::kBadCall).call).op, abi::Op::kDispatch);
  EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]), 1u);
  calls_->resume(0, {});
  ring(calls_->combine(0), 1);  // its tokens are the routing's
  refused(OpError::kBadCall);
  calls_->resume(0, {});
  abi::Call nowhere = calls_->dispatch(0);
  nowhere.slot = CallWorld::kDepth;
  ring(nowhere);
  EXPECT_EQ(abi::unpack(refused(OpError::kBadCall).call).slot, CallWorld::kDepth);
  calls_->resume(0, {});
  ring(calls_->combine(1));
  refused(OpError::kNoRouting);
  calls_->resume(0, {});
  ring(calls_->dispatch(0), 2);
  EXPECT_EQ(calls_->journal(0).result.error, OpError::kNone);
}

TEST_F(FakeCudaCallEnds, ARoutingOfAChangedGroupServesNoDispatch) {
  start();
  ring(calls_->dispatch(0), 2);
  calls_->journal(0);
  CallWorld::Start later;
  later.epoch = 3;
  later.index = 1;
  later.changed_epoch = 2;
  later.routes[0] = calls_->own(0).routes[0];
  calls_->halt(0);
  calls_->resume(0, later);
  ring(calls_->combine(0));
  EXPECT_EQ(calls_->journal(0).result.error, OpError::kNone);
  ring(calls_->cached(0));
  EXPECT_EQ(refused(OpError::kOldRouting).result.rows, 1u);
}

TEST_F(FakeCudaCallEnds, CommandsOfAnotherEpochAreDiscarded) {
  start();
  words().epoch = 2;
  ring(calls_->dispatch(0), 2);
  EXPECT_EQ(now(words().failed), 1u);
  words().epoch = 1 + 256;  // its low bits count
  ring(calls_->dispatch(0), 2);
  EXPECT_EQ(abi::unpack(calls_->journal(0).call).number, 1u);
  EXPECT_EQ(now(words().failed), 1u);
}

TEST_F(FakeCudaCallEnds, ALappedRingIsNoticed) {
  start();
  ring(CallWorld::noop());
  EXPECT_EQ(abi::unpack(calls_->journal(0).call).number, 0u);
  const std::uint32_t later = 1 + abi::kCallSlots;
  abi::Call call = CallWorld::noop();
  call.number = later;
  call.flagged = true;
  call.epoch = 1;
  words().tail = later + 1;
  calls_->store(0, call);
  ASSERT_TRUE(comes([&] { return now(words().done) == later + 1; }));
  EXPECT_EQ(now(words().failed), abi::kCallSlots + 1);
  const JournalEntry lost = refused(OpError::kLostCall);
  EXPECT_EQ(lost.result.rows, later);
  EXPECT_EQ(lost.result.room, 1u) << "the call that was awaited";
}

TEST_F(FakeCudaCallEnds, AnEngineThatIsNewGoesOnWhereTheOldOneWas) {
  make(1);
  const std::uint32_t sequence = 0xfffffffe;  // numbers are cyclic
  const auto old_noop = [](std::uint32_t number) {
    abi::Call call = CallWorld::noop();
    call.number = number;
    call.epoch = 1;
    return call;
  };
  words().tail = sequence;
  words().done = sequence;
  for (std::uint32_t i = 1; i <= abi::kCallSlots; ++i) calls_->store(0, old_noop(sequence - i));
  calls_->own(0).state->sequence[kernels::kByStreams] = sequence;
  calls_->open(0);
  calls_->resume(0, {});
  for (std::uint32_t i = 0; i < 4; ++i) {
    ring(CallWorld::noop());
    EXPECT_EQ(abi::unpack(calls_->journal(0).call).number, sequence + i);
  }
  EXPECT_EQ(now(words().done), 2u);
  calls_->close(0);
  calls_->open(0);
  ring(CallWorld::noop());
  EXPECT_EQ(abi::unpack(calls_->journal(0).call).number, 2u);
  EXPECT_EQ(now(words().failed), 0u);
}

TEST_F(FakeCudaCallEnds, AFullJournalHoldsUpCommandsAndTurnsAreTakenMeanwhile) {
  start();
  const std::uint32_t entries = kernels::kJournalEntries;
  for (std::uint32_t i = 0; i < entries; ++i) ring(CallWorld::noop());
  CallWorld::Ring how;
  how.waits = false;
  calls_->ring(0, CallWorld::noop(), how);
  calls_->synchronise(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(now(words().done), entries);
  for (std::uint32_t i = 0; i < entries; ++i) ASSERT_EQ(abi::unpack(calls_->journal(0).call).number, i);
  calls_->tell_read(0);
  EXPECT_EQ(abi::unpack(calls_->journal(0).call).number, entries);
  for (std::uint32_t i = 1; i < entries; ++i) ring(CallWorld::noop());
  calls_->ring(0, CallWorld::noop(), how);
  calls_->halt(0);
  calls_->ring_bell(0);  // discards it
  EXPECT_TRUE(comes([&] { return now(words().done) == 2 * entries + 1; }));
  EXPECT_EQ(now(words().failed), 1u);
}

TEST_F(FakeCudaCallEnds, AnOperationThatFailsIsToldAndHaltsOthers) {
  start(2);
  choices(0)[2 * 4 + 1] = 8;
  ring(calls_->dispatch(0), 5, true);
  const JournalEntry entry = calls_->journal(0);
  EXPECT_EQ(entry.result.error, OpError::kBadChoice);
  EXPECT_EQ(entry.result.tag, abi::op_tag(1, 0));
  EXPECT_EQ(entry.result.left, entry.result.tag);
  EXPECT_EQ(entry.result.token, 2u);
  EXPECT_EQ(entry.index, 0u);
  EXPECT_EQ(now(words().failed), 1u);
  EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]), 1u);
  EXPECT_EQ(calls_->own(0).routes[0].tag, 0u);
  ring(calls_->dispatch(1), 5);
  EXPECT_EQ(now(words().failed), 2u);
  // The other rank waits for this one until the host halts it.
  CallWorld::Ring how;
  how.num_tokens = 5;
  calls_->ring(1, calls_->dispatch(0), how);
  const auto* ready = reinterpret_cast<const abi::SignalLine*>(calls_->own(1).exchange);
  ASSERT_TRUE(comes([&] { return now(ready[1].tag) == abi::op_tag(1, 0); })) << "its own, in the first block";
  EXPECT_EQ(now(words(1).done), 0u);
  calls_->halt(1);
  const JournalEntry other = calls_->journal(1);
  EXPECT_EQ(other.result.error, OpError::kAborted);
  EXPECT_EQ(other.result.failed_rank, 0);
  calls_->synchronise(1);
  EXPECT_EQ(now(words(1).failed), 1u);
  // Then both continue.
  choices(0)[2 * 4 + 1] = 7;
  for (std::uint32_t r = 0; r < 2; ++r) {
    CallWorld::Start again;
    again.epoch = 2;
    calls_->resume(r, again);
  }
  for (std::uint32_t r = 0; r < 2; ++r) calls_->ring(r, calls_->dispatch(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) {
    const JournalEntry end = calls_->journal(r);
    EXPECT_EQ(end.result.error, OpError::kNone);
    EXPECT_EQ(end.result.tag, abi::op_tag(2, 0));
  }
}

TEST_F(FakeCudaCallEnds, ARankThatCameLaterHasNoRowsOfOlderRoutings) {
  start(2);
  CallWorld::Ring how;
  how.num_tokens = kTokens;
  for (std::uint32_t r = 0; r < 2; ++r) calls_->ring(r, calls_->dispatch(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) EXPECT_EQ(calls_->journal(r).result.error, OpError::kNone);
  for (std::uint32_t r = 0; r < 2; ++r) {
    calls_->own(r).view->peers[1].since = 2;
    const std::size_t words = std::size_t{kTokens} * calls_->world().shape().hidden;
    std::fill_n(calls_->rank(r).y, calls_->world().shape().recv_rows * words / kTokens,
                r == 0 ? 0x3f80 : 0x4000);
    std::fill_n(calls_->rank(r).out, words, 0xffff);
  }
  how.num_tokens = 0;
  for (std::uint32_t r = 0; r < 2; ++r) calls_->ring(r, calls_->combine(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) EXPECT_EQ(calls_->journal(r).result.error, OpError::kNone);
  // Tokens go to rank 0 and rank 1 in turn: 1.0 came, and nothing did.
  EXPECT_EQ(calls_->rank(0).out[0], 0x3f80);
  EXPECT_EQ(calls_->rank(0).out[calls_->world().shape().hidden], 0);
}

TEST_F(FakeCudaCallEnds, WhoRingsWhenItIsClosedWaitsForNothing) {
  make(1);
  words().closed = 1;
  ring(CallWorld::noop(), 0, true);
  EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kNoop, 0)]), 1u);
  EXPECT_EQ(now(words().tail), 1u);
  EXPECT_EQ(words().calls[0].words[0], 0u);
  calls_->open(0);
}

}  // namespace
}  // namespace epd::fake_cuda_test
