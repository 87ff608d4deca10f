// What an engine finds that was killed with operations of its host-submitting ranks in flight.

#include "engine_calls_fixture.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cstring>
#include <utility>

namespace epd::test {
namespace {

class EngineRestartTest : public EngineCallsFixture {
 protected:
  EngineRestartTest() : EngineCallsFixture({1, 1, 0}, "host") {}

  // By all ranks, with the rows of `slot` and the routing of dispatch `routing`.
  void dispatch_again(std::uint32_t slot, std::uint64_t routing) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      abi::Submission s = submission(rank, Op::kDispatch, slot);
      s.flags = abi::kFlagCached;
      s.handle = routing;
      session(rank).submit(s);
    }
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const auto done = session(rank).wait();
      ASSERT_TRUE(done.has_value() && done->status == StatusCode::kOk);
    }
    ++next_;
  }

  // As if it had been killed before it saw that operations had ended, from `first` on, all of them on `slot`.
  void kill_engine_1_before_it_saw(std::uint64_t first, std::uint32_t slot) {
    ASSERT_EQ(engines_[1]->stop(), 0);
    group_->board(1).next_index = first;
    group_->board(1).slots[slot].counts_ticket = 0;
    std::memset(board_bytes() + abi::BoardLayout(kShape).rank_offsets(slot), 0xa5,
                sizeof(std::int32_t) * (kRanks + 1));
    for (std::uint64_t index = first; index < next_; ++index) {
      const std::uint64_t ticket = index - first_op_ + 1;  // rank 1 has submitted nothing else
      session(1).b().inflight[index - first] = {ticket, index, 0, RawGroup::member(1), slot, slot, 0};
    }
  }

  // One dispatch and the combine of it, of which the engine sees neither: the first has ended for sure.
  void unseen_round(bool cached) {
    const std::uint32_t slot = random_() % kShape.depth;
    for (std::uint32_t rounds = random_() % 4; rounds > 0; --rounds) run_and_check(slot);
    const auto inputs = fill(slot);
    const auto answers = answer(slot, inputs);
    const std::uint64_t routing = next_;
    if (cached) run(Op::kDispatch, slot, inputs);
    const std::uint64_t unseen = next_;
    cached ? dispatch_again(slot, routing) : run(Op::kDispatch, slot, inputs);
    run(Op::kCombine, slot, inputs, routing);
    ASSERT_FALSE(HasFatalFailure());
    kill_engine_1_before_it_saw(unseen, slot);
    start_engine_1_again();
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_EQ(next_, unseen + 1) << "all before what was begun last has ended";
    expect_dispatched(slot, unseen, reference::dispatch(params(), inputs)[1]);
    EXPECT_EQ(session(1).wait()->status, StatusCode::kEngineRestarted);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank)
      std::fill_n(group_->region<std::uint16_t>(rank, slot, Region::kOut),
                  std::size_t{inputs[rank].num_tokens} * kShape.hidden, std::uint16_t{0x7fc0});
    run(Op::kCombine, slot, inputs, routing);
    ASSERT_FALSE(HasFatalFailure());
    check_sums(slot, inputs, answers);
    run_and_check(slot);
  }

  // The next completion of rank 1, and what its board says besides.
  void expect_dispatched(std::uint32_t slot, std::uint64_t index, const reference::RankReceived& expected) {
    const auto done = session(1).wait();
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->status, StatusCode::kOk);
    EXPECT_EQ(done->op_index, index);
    EXPECT_EQ(done->num_recv_rows, expected.num_recv_rows);
    const abi::BoardSlot& told = group_->board(1).slots[slot];
    EXPECT_EQ(told.counts_ticket.load(), done->ticket);
    EXPECT_EQ(told.num_recv_rows, expected.num_recv_rows);
    const abi::BoardLayout layout(kShape);
    expect_words(layout.rank_offsets(slot), expected.rank_offsets);
    expect_words(layout.expert_counts(kShape, slot), expected.expert_counts);
  }
  void expect_words(std::uint64_t offset, const std::vector<std::int32_t>& expected) {
    const auto* told = reinterpret_cast<const std::int32_t*>(board_bytes() + offset);
    EXPECT_EQ(std::vector<std::int32_t>(told, told + expected.size()), expected);
  }
  std::byte* board_bytes() { return reinterpret_cast<std::byte*>(&group_->board(1)); }
};

// Peers may have gone on, and overwritten what it would take to do it again.
TEST_F(EngineRestartTest, WhatTheDeviceHadCompletedIsNotDoneAgain) {
  unseen_round(false);
}

TEST_F(EngineRestartTest, CountsOfAnOldRoutingAreToldAgain) {
  unseen_round(true);
}

// Whoever is refused between kResume and the first operation asks the board at once which epoch it is.
TEST_F(EngineRestartTest, BoardsSayThatTheGroupIsBrokenUntilItGoesOn) {
  const auto board_is = [this](abi::GroupState state) {
    return group_->board(1).state.load() == static_cast<std::uint32_t>(state);
  };
  run_and_check(0);
  ASSERT_EQ(engines_[1]->stop(), 0);
  ASSERT_TRUE(board_is(abi::GroupState::kActive)) << "as an engine that was killed leaves it";
  break_without_engine_1();
  engines_[1]->start();
  session(1).add_to(*engine_view_[1]);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  EXPECT_TRUE(board_is(abi::GroupState::kBroken));
  EXPECT_EQ(group_->board(1).epoch.load(), group_->epoch);
  EXPECT_EQ(group_->board(1).cause.load(), static_cast<std::uint32_t>(StatusCode::kEngineRestarted));
  group_->resume_index = next_;
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(board_is(abi::GroupState::kActive));
  run_and_check(1);
}

// The same as tags begin anew: what the former engine left is counted from the old base.
class EngineRestartNearWrapTest : public EngineRestartTest {
 protected:
  EngineRestartNearWrapTest() { first_op_ = 2 * abi::kTagRound - random_() % 10; }
};

TEST_F(EngineRestartNearWrapTest, WhatTheDeviceHadCompletedIsNotDoneAgain) {
  unseen_round(false);
}

TEST_F(EngineRestartNearWrapTest, CountsOfAnOldRoutingAreToldAgain) {
  unseen_round(true);
}

// Its last signals came with the break.
TEST_F(EngineRestartTest, AnAbortedOperationThatEveryRankCompletedCounts) {
  run_and_check(0);
  const auto inputs = fill(0);
  abi::Submission s = submission(0, Op::kDispatch, 0);
  s.num_tokens = inputs[0].num_tokens;
  session(0).submit(s);
  all_arrive_at(0, next_);
  const std::uint64_t index = next_;
  break_all(StatusCode::kRankLost);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(group_->board(0).next_index.load(), index + 1);
  EXPECT_EQ(next_, index) << "the others have not";
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  const auto done = session(0).wait();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->status, StatusCode::kOk);
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(0);
}

}  // namespace
}  // namespace epd::test
