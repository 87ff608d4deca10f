// All the ways in which commands end, on the fake driver.
#include "unit/fake_cuda_cases.h"
#include "unit/fake_cuda_command_world.h"

#include "proto/arena.h"

#include <algorithm>

namespace epd::fake_cuda_test {
namespace {

constexpr std::uint32_t kTokens = 12;

// One rank, unless a test says else.
class FakeCudaCommandEnds : public ::testing::Test {
 protected:
  void make(std::uint32_t ranks) {
    Case c;
    c.group.num_ranks = ranks;
    c.group.num_experts = ranks * 4;
    c.group.hidden = 256;
    c.group.topk = 4;
    commands_ = std::make_unique<CommandWorld>(shape_of(c, std::uint64_t{ranks} * kTokens), kTokens);
    for (std::uint32_t r = 0; r < ranks; ++r) {
      for (std::size_t i = 0; i < std::size_t{kTokens} * 4; ++i)
        choices(r)[i] = static_cast<std::int64_t>(i % (std::size_t{ranks} * 4));
    }
  }
  void TearDown() override {
    for (std::uint32_t r = 0; commands_ != nullptr && r < commands_->size(); ++r) commands_->stop_kernel(r);
  }
  void start(std::uint32_t ranks = 1) {
    make(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) commands_->start_kernel(r);
    for (std::uint32_t r = 0; r < ranks; ++r) commands_->resume(r, {});
  }
  std::int64_t* choices(std::uint32_t r) { return static_cast<std::int64_t*>(commands_->rank(r).topk_idx); }
  CommandWords& words(std::uint32_t r = 0) { return *commands_->own(r).words; }
  void ring(const abi::Call& call, std::uint32_t num_tokens = 0, bool flagged = false) {
    CommandWorld::Ring how;
    how.num_tokens = num_tokens;
    how.flagged = flagged;
    commands_->ring(0, call, how);
    commands_->synchronise(0);
  }
  // The next end is this error, nothing is carried out after it, and all is well in the next turn.
  JournalEntry refused(OpError error) {
    const JournalEntry entry = commands_->journal(0);
    EXPECT_EQ(entry.result.error, error);
    EXPECT_EQ(entry.result.tag, 0u);
    const std::uint32_t failed = now(words().failed);
    const std::uint32_t done = now(words().done);
    ring(CommandWorld::noop(), 0, true);
    EXPECT_EQ(now(words().failed), failed + 1);
    EXPECT_EQ(now(words().done), done + 1);
    EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kNoop, 0)]), 1u);
    return entry;
  }

  std::unique_ptr<CommandWorld> commands_;
};

TEST_F(FakeCudaCommandEnds, HaltedAtFirstItDiscards) {
  make(1);
  commands_->start_kernel(0);
  ring(commands_->dispatch(0), 3, true);
  ring(CommandWorld::noop());
  EXPECT_EQ(now(words().done), 2u);
  EXPECT_EQ(now(words().failed), 2u);
  EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]), 1u);
  commands_->resume(0, {});
  ring(commands_->dispatch(0), 3);
  const JournalEntry entry = commands_->journal(0);
  EXPECT_EQ(entry.result.error, OpError::kNone);
  EXPECT_EQ(entry.result.tag, abi::op_tag(1, 0));
  EXPECT_EQ(entry.result.num_recv_rows, 3u);
  EXPECT_EQ(abi::unpack(entry.call).number, 2u);
  EXPECT_EQ(now(words().failed), 2u);
  commands_->halt(0);
  ring(commands_->dispatch(0), 3);
  EXPECT_EQ(now(words().failed), 3u);
}

TEST_F(FakeCudaCommandEnds, TokensMayBeKnownOnlyToTheDevice) {
  start();
  std::uint32_t* const at = commands_->own(0).arena->take<std::uint32_t>(1);
  for (const std::uint32_t tokens : {5u, 0u, kTokens}) {
    *at = tokens;
    CommandWorld::Ring how;
    how.num_tokens_at = at;
    commands_->ring(0, commands_->dispatch(1), how);
    EXPECT_EQ(abi::unpack(commands_->journal(0).call).num_tokens, tokens);
  }
  *at = 1u << 20;  // more than a command has room for
  CommandWorld::Ring how;
  how.num_tokens_at = at;
  commands_->ring(0, commands_->dispatch(1), how);
  EXPECT_EQ(abi::unpack(refused(OpError::kBadCall).call).num_tokens, abi::kMostCommandTokens);
}

TEST_F(FakeCudaCommandEnds, WhatIsIllegalIsRefusedAndOthersDiscarded) {
  start();
  ring(commands_->dispatch(0), kTokens + 1, true);
  EXPECT_EQ(abi::unpack(refused(OpError::kBadCall).call).op, abi::Op::kDispatch);
  EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]), 1u);
  commands_->resume(0, {});
  ring(commands_->combine(0), 1);  // its tokens are the routing's
  refused(OpError::kBadCall);
  commands_->resume(0, {});
  abi::Call nowhere = commands_->dispatch(0);
  nowhere.slot = CommandWorld::kDepth;
  ring(nowhere);
  EXPECT_EQ(abi::unpack(refused(OpError::kBadCall).call).slot, CommandWorld::kDepth);
  commands_->resume(0, {});
  ring(commands_->combine(1));
  refused(OpError::kNoRouting);
  commands_->resume(0, {});
  ring(commands_->dispatch(0), 2);
  EXPECT_EQ(commands_->journal(0).result.error, OpError::kNone);
}

TEST_F(FakeCudaCommandEnds, ARoutingOfAChangedGroupServesNoDispatch) {
  start();
  ring(commands_->dispatch(0), 2);
  commands_->journal(0);
  CommandWorld::Start later;
  later.epoch = 3;
  later.index = 1;
  later.changed_epoch = 2;
  later.routes[0] = commands_->own(0).routes[0];
  commands_->halt(0);
  commands_->resume(0, later);
  ring(commands_->combine(0));
  EXPECT_EQ(commands_->journal(0).result.error, OpError::kNone);
  ring(commands_->cached(0));
  EXPECT_EQ(refused(OpError::kOldRouting).result.rows, 1u);
}

TEST_F(FakeCudaCommandEnds, CommandsOfAnotherEpochAreDiscarded) {
  start();
  words().epoch = 2;
  ring(commands_->dispatch(0), 2);
  EXPECT_EQ(now(words().failed), 1u);
  words().epoch = 1 + 256;  // its low bits count
  ring(commands_->dispatch(0), 2);
  EXPECT_EQ(abi::unpack(commands_->journal(0).call).number, 1u);
  EXPECT_EQ(now(words().failed), 1u);
}

TEST_F(FakeCudaCommandEnds, ALappedRingIsNoticed) {
  start();
  ring(CommandWorld::noop());
  EXPECT_EQ(abi::unpack(commands_->journal(0).call).number, 0u);
  const std::uint32_t later = 1 + abi::kCommandSlots;
  abi::Call call = CommandWorld::noop();
  call.number = later;
  call.flagged = true;
  call.epoch = 1;
  words().tail = later + 1;
  commands_->store(0, call);
  ASSERT_TRUE(comes([&] { return now(words().done) == later + 1; }));
  EXPECT_EQ(now(words().failed), abi::kCommandSlots + 1);
  const JournalEntry lost = refused(OpError::kLostCommand);
  EXPECT_EQ(lost.result.rows, later);
  EXPECT_EQ(lost.result.room, 1u) << "the command that was awaited";
}

TEST_F(FakeCudaCommandEnds, AnEngineThatIsNewGoesOnWhereTheOldOneWas) {
  make(1);
  const std::uint32_t sequence = 0xfffffffe;  // numbers are cyclic
  const auto old_noop = [](std::uint32_t number) {
    abi::Call call = CommandWorld::noop();
    call.number = number;
    call.epoch = 1;
    return call;
  };
  words().tail = sequence;
  words().done = sequence;
  for (std::uint32_t i = 1; i <= abi::kCommandSlots; ++i) commands_->store(0, old_noop(sequence - i));
  commands_->own(0).host->start.sets = 1;
  commands_->own(0).host->start.sequence[kernels::cuda::kByStreams] = sequence;
  commands_->start_kernel(0);
  commands_->resume(0, {});
  for (std::uint32_t i = 0; i < 4; ++i) {
    ring(CommandWorld::noop());
    EXPECT_EQ(abi::unpack(commands_->journal(0).call).number, sequence + i);
  }
  EXPECT_EQ(now(words().done), 2u);
  commands_->stop_kernel(0);
  commands_->start_kernel(0);  // `sets` stands, and counts no more
  ring(CommandWorld::noop());
  EXPECT_EQ(abi::unpack(commands_->journal(0).call).number, 2u);
  EXPECT_EQ(now(words().failed), 0u);
}

TEST_F(FakeCudaCommandEnds, AFullJournalHoldsUpCommandsAndTurnsAreTakenMeanwhile) {
  start();
  const std::uint32_t entries = kernels::cuda::kJournalEntries;
  for (std::uint32_t i = 0; i < entries; ++i) ring(CommandWorld::noop());
  CommandWorld::Ring how;
  how.waits = false;
  commands_->ring(0, CommandWorld::noop(), how);
  commands_->synchronise(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(now(words().done), entries);
  for (std::uint32_t i = 0; i < entries; ++i) ASSERT_EQ(abi::unpack(commands_->journal(0).call).number, i);
  commands_->tell_read(0);
  EXPECT_EQ(abi::unpack(commands_->journal(0).call).number, entries);
  for (std::uint32_t i = 1; i < entries; ++i) ring(CommandWorld::noop());
  commands_->ring(0, CommandWorld::noop(), how);
  commands_->halt(0);  // discards it
  EXPECT_TRUE(comes([&] { return now(words().done) == 2 * entries + 1; }));
  EXPECT_EQ(now(words().failed), 1u);
}

TEST_F(FakeCudaCommandEnds, AnOperationThatFailsIsToldAndHaltsOthers) {
  start(2);
  choices(0)[2 * 4 + 1] = 8;
  ring(commands_->dispatch(0), 5, true);
  const JournalEntry entry = commands_->journal(0);
  EXPECT_EQ(entry.result.error, OpError::kBadChoice);
  EXPECT_EQ(entry.result.tag, abi::op_tag(1, 0));
  EXPECT_EQ(entry.result.left, entry.result.tag);
  EXPECT_EQ(entry.result.token, 2u);
  EXPECT_EQ(entry.index, 0u);
  EXPECT_EQ(now(words().failed), 1u);
  EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]), 1u);
  EXPECT_EQ(commands_->own(0).routes[0].tag, 0u);
  ring(commands_->dispatch(1), 5);
  EXPECT_EQ(now(words().failed), 2u);
  // The other rank waits for this one until the host halts it.
  CommandWorld::Ring how;
  how.num_tokens = 5;
  commands_->ring(1, commands_->dispatch(0), how);
  const auto* ready = reinterpret_cast<const abi::SignalLine*>(commands_->own(1).exchange);
  ASSERT_TRUE(comes([&] { return now(ready[1].tag) == abi::op_tag(1, 0); })) << "its own, in the first block";
  EXPECT_EQ(now(words(1).done), 0u);
  commands_->halt(1);
  const JournalEntry other = commands_->journal(1);
  EXPECT_EQ(other.result.error, OpError::kAborted);
  EXPECT_EQ(other.result.culprit, 0);
  commands_->synchronise(1);
  EXPECT_EQ(now(words(1).failed), 1u);
  // And then both go on.
  choices(0)[2 * 4 + 1] = 7;
  for (std::uint32_t r = 0; r < 2; ++r) {
    CommandWorld::Start again;
    again.epoch = 2;
    commands_->resume(r, again);
  }
  for (std::uint32_t r = 0; r < 2; ++r) commands_->ring(r, commands_->dispatch(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) {
    const JournalEntry end = commands_->journal(r);
    EXPECT_EQ(end.result.error, OpError::kNone);
    EXPECT_EQ(end.result.tag, abi::op_tag(2, 0));
  }
}

TEST_F(FakeCudaCommandEnds, ARankThatCameLaterHasNoRowsOfOlderRoutings) {
  start(2);
  CommandWorld::Ring how;
  how.num_tokens = kTokens;
  for (std::uint32_t r = 0; r < 2; ++r) commands_->ring(r, commands_->dispatch(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) EXPECT_EQ(commands_->journal(r).result.error, OpError::kNone);
  for (std::uint32_t r = 0; r < 2; ++r) {
    commands_->own(r).view->peers[1].since = 2;
    const std::size_t words = std::size_t{kTokens} * commands_->world().shape().hidden;
    std::fill_n(commands_->rank(r).y, commands_->world().shape().recv_rows * words / kTokens,
                r == 0 ? 0x3f80 : 0x4000);
    std::fill_n(commands_->rank(r).out, words, 0xffff);
  }
  how.num_tokens = 0;
  for (std::uint32_t r = 0; r < 2; ++r) commands_->ring(r, commands_->combine(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) EXPECT_EQ(commands_->journal(r).result.error, OpError::kNone);
  // Tokens go to rank 0 and rank 1 in turn: 1.0 came, and nothing did.
  EXPECT_EQ(commands_->rank(0).out[0], 0x3f80);
  EXPECT_EQ(commands_->rank(0).out[commands_->world().shape().hidden], 0);
}

TEST_F(FakeCudaCommandEnds, WhoRingsWhenItIsClosedWaitsForNothing) {
  make(1);
  words().closed = 1;
  ring(CommandWorld::noop(), 0, true);
  EXPECT_EQ(now(words().flags[abi::flag_of(abi::Op::kNoop, 0)]), 1u);
  EXPECT_EQ(now(words().tail), 1u);
  EXPECT_EQ(words().calls[0].words[0], 0u);
  commands_->start_kernel(0);
}

}  // namespace
}  // namespace epd::fake_cuda_test
