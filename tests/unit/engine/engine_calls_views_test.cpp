// The engine's page shows calls that are enqueued and have not ended.
#include "engine_fixture.h"

#include <gtest/gtest.h>
#include <numeric>

namespace epd::test {
namespace {

// A call as its rank's engine shows it.
struct Shown {
  std::uint64_t ticket, session_id, group_id, op_index, epoch;
  Op op;
  std::uint32_t slot, num_tokens;
  abi::OpStage stage;
  std::int32_t waiting_for;
};
std::vector<Shown> shown_in(const Mapping& page, std::uint32_t rank) {
  std::vector<Shown> all;
  for (const abi::OpView& op : page.as<abi::EnginePage>()->ops) {
    const std::uint64_t ticket = op.ticket.load(std::memory_order_acquire);
    if (ticket == 0 || op.rank != rank) continue;
    all.push_back({ticket, op.session_id, op.group_id, op.op_index, op.epoch, op.op, op.slot, op.num_tokens,
                   static_cast<abi::OpStage>(op.stage.load()), op.waiting_for.load()});
  }
  std::sort(all.begin(), all.end(), [](const Shown& a, const Shown& b) { return a.ticket < b.ticket; });
  return all;
}

class EngineCallsViewsTest : public EngineFixture {
 protected:
  explicit EngineCallsViewsTest(std::string kind = "cuda", std::vector<std::uint32_t> by_stream = {1, 1, 0})
      : EngineFixture(std::move(kind), std::move(by_stream)) {}
  void SetUp() override {
    EngineFixture::SetUp();
    for (EngineThread* engine : engine_view_) pages_.push_back(map_page(*engine));
  }

  // The calls of a rank, by number of the call.
  std::vector<Shown> shown(std::uint32_t rank) const { return shown_in(pages_[rank % 2], rank); }
  bool comes_to_show(std::uint32_t rank, std::size_t count) {
    return comes([&] { return shown(rank).size() == count; });
  }
  // The rank's first operation.
  bool comes_to(std::uint32_t rank, abi::OpStage stage, std::int32_t waiting_for) {
    return comes([&] {
      const auto all = shown(rank);
      return !all.empty() && all[0].stage == stage && all[0].waiting_for == waiting_for;
    });
  }
  // Long enough for several looks.
  static void look_away() { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

  std::vector<Mapping> pages_;
};

TEST_F(EngineCallsViewsTest, WhatIsRungIsShownUntilItEnds) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  const auto inputs = fill(1);
  const std::uint32_t first = ringers_[0].ring(dispatch_on(1), inputs[0].num_tokens, group_->epoch);
  ASSERT_TRUE(comes_to_show(0, 1));
  ASSERT_TRUE(comes_to(0, abi::OpStage::kWaitReady, 2)) << "of the same device";
  ASSERT_TRUE(begins_alone(0, next_));
  const std::uint32_t noop = ringers_[0].ring(kNoopCall, 0, group_->epoch);
  const std::uint32_t last = ringers_[0].ring(combine_on(1), 0, group_->epoch);
  ASSERT_TRUE(comes_to_show(0, 3));
  ASSERT_TRUE(comes_to(0, abi::OpStage::kWaitReady, 1));
  const auto all = shown(0);
  const Op ops[] = {Op::kDispatch, Op::kNoop, Op::kCombine};
  const std::uint64_t indices[] = {next_, next_ + 1, next_ + 1};
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(all[i].op, ops[i]);
    EXPECT_EQ(all[i].op_index, indices[i]);
    EXPECT_EQ(all[i].stage, i == 0 ? abi::OpStage::kWaitReady : abi::OpStage::kPlanning);
    EXPECT_EQ(all[i].slot, i == 1 ? 0u : 1u);
    EXPECT_EQ(all[i].num_tokens, i == 0 ? inputs[0].num_tokens : 0u);
    EXPECT_EQ(all[i].session_id, session(0).id());
    EXPECT_EQ(all[i].group_id, kGroup);
    EXPECT_EQ(all[i].epoch, group_->epoch);
    EXPECT_EQ(all[i].waiting_for, i == 0 ? 1 : -1);
  }
  EXPECT_TRUE(shown(1).empty()) << "rank 1 has enqueued nothing";
  // The others come, and all of it ends.
  ringers_[1].ring(dispatch_on(1), inputs[1].num_tokens, group_->epoch);
  EXPECT_TRUE(ends_well(2, ring(2, dispatch_on(1), inputs[2].num_tokens)));
  EXPECT_TRUE(ringers_[0].ended(first));
  EXPECT_TRUE(ringers_[0].ended(noop));
  ASSERT_TRUE(comes([&] {
    const auto now = shown(0);
    return now.size() == 1 && now[0].op == Op::kCombine && now[0].stage == abi::OpStage::kWaitReady;
  })) << "the next one runs";
  ringers_[1].ring(combine_on(1), 0, group_->epoch);
  EXPECT_TRUE(ends_well(2, ring(2, combine_on(1))));
  EXPECT_TRUE(ringers_[0].ended(last));
  for (const std::uint32_t rank : {0u, 1u, 2u}) EXPECT_TRUE(comes_to_show(rank, 0)) << rank;
}

// Those of before are discarded, and shown no more, though they still lie in the ring.
TEST_F(EngineCallsViewsTest, ABreakShowsNothingAndTheNextEpochItsOwn) {
  run_and_check(0);
  ringers_[0].ring(dispatch_on(1), 0, group_->epoch);
  ringers_[0].ring(combine_on(1), 0, group_->epoch);
  ASSERT_TRUE(comes_to_show(0, 2));
  break_all(StatusCode::kAborted);
  EXPECT_TRUE(comes_to_show(0, 0));
  resume_all();
  look_away();
  EXPECT_TRUE(shown(0).empty());
  const auto inputs = fill(0);
  ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  ASSERT_TRUE(comes_to_show(0, 1));
  EXPECT_EQ(shown(0)[0].epoch, 2u);
  EXPECT_EQ(shown(0)[0].op_index, next_);
}

TEST_F(EngineCallsViewsTest, AnotherEngineShowsWhatIsRungToIt) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  EXPECT_EQ(engines_[1]->stop(), 0);
  start_engine_1_again();
  ASSERT_FALSE(HasFatalFailure());
  const auto inputs = fill(1);
  ringers_[1].ring(dispatch_on(1), inputs[1].num_tokens, group_->epoch);
  ASSERT_TRUE(comes_to_show(1, 1));
  EXPECT_EQ(shown(1)[0].op_index, next_);
  EXPECT_EQ(shown(1)[0].num_tokens, inputs[1].num_tokens);
}

// The ring is the client's: what is no call that comes next is not shown.
TEST_F(EngineCallsViewsTest, WordsThatAreNoNextCallAreNotShown) {
  run_and_check(0);
  abi::CallWords& words = group_->words(0);
  const std::uint32_t next = words.tail;
  const auto epoch = static_cast<std::uint32_t>(group_->epoch);
  for (std::uint32_t ahead = 1; ahead < 20; ++ahead) {
    abi::Call call = call_on(static_cast<Op>(random_() % 4), static_cast<std::uint32_t>(random_() % 16));
    call.number = next + ahead;
    call.num_tokens = static_cast<std::uint32_t>(random_() % 9);
    call.flagged = random_() % 2 != 0;
    call.epoch = epoch;
    store_call(words.calls, call);
    store_call(words.host_calls, call);
  }
  look_away();
  EXPECT_TRUE(shown(0).empty());
}

// The page has space for other ranks, however many calls one rank makes.
TEST_F(EngineCallsViewsTest, NotMoreThanSixteenOfARankAreShown) {
  ringers_[0].ring(dispatch_on(0), 0, group_->epoch);
  for (int i = 0; i < 40; ++i) ringers_[0].ring(kNoopCall, 0, group_->epoch);
  ASSERT_TRUE(comes_to_show(0, 16));
  look_away();
  EXPECT_EQ(shown(0).size(), 16u);
}

// The same of calls of streams and of hosts, and on host devices.
class EngineWaits : public EngineCallsViewsTest, public ::testing::WithParamInterface<const char*> {
 protected:
  EngineWaits()
      : EngineCallsViewsTest(
            is("host_devices") ? "host" : "cuda",
            is("streams") ? std::vector<std::uint32_t>{1, 1, 1} : std::vector<std::uint32_t>(kRanks)) {}
  static bool is(const char* word) { return std::string(GetParam()) == word; }
  // Rank 0 has been asked, and others have not; one of those is on its device.
  bool waits_for_rank_1() {
    return (on_host() || comes_to(0, abi::OpStage::kWaitReady, 2)) && begins_alone(0, next_) &&
           comes_to(0, abi::OpStage::kWaitReady, 1);
  }
  void ask_of(std::uint32_t rank, Op op, std::uint32_t slot) {
    there_ = {rank};
    ask(call_on(op, slot), std::vector<reference::RankInput>(kRanks));
  }
  // Rank `from` tells rank `to` in its name that it takes part in a dispatch of no tokens.
  void announce(std::uint32_t from, std::uint32_t to, std::uint64_t index, std::uint32_t slot) {
    const abi::ExchangeArenaLayout layout(kShape);
    const Mapping exchange = group_->map_exchange(to);
    std::byte* const block = exchange.bytes() + layout.block(in_tags(index), kShape.depth);
    const std::uint64_t tag = abi::op_tag(group_->epoch, in_tags(index));
    reinterpret_cast<abi::OpAnnouncement*>(block + layout.announcement)[from] = {
        tag, static_cast<std::uint32_t>(Op::kDispatch), static_cast<std::uint16_t>(slot), 0, 0, 0, 0, 0, 0};
    auto* const lines = reinterpret_cast<abi::SignalLine*>(block + layout.ready);
    std::atomic_ref(lines[from].tag).store(tag);
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, EngineWaits, ::testing::Values("streams", "hosts", "host_devices"));

// Host devices count when a signal comes, not before.
class EngineWaitsOfKernels : public EngineWaits {};
INSTANTIATE_TEST_SUITE_P(Ways, EngineWaitsOfKernels, ::testing::Values("streams", "hosts"));

TEST_P(EngineWaits, NameTheRankThatHasNotCalled) {
  run_and_check(0);
  ask_of(0, Op::kDispatch, 1);
  EXPECT_TRUE(waits_for_rank_1());
  ask_of(1, Op::kDispatch, 1);
  EXPECT_TRUE(comes_to(0, abi::OpStage::kWaitReady, 2));
  EXPECT_TRUE(comes_to(1, abi::OpStage::kWaitReady, 2));
  ask_of(2, Op::kDispatch, 1);
  for (const std::uint32_t rank : {0u, 1u, 2u}) EXPECT_TRUE(comes_to_show(rank, 0)) << rank;
}

TEST_P(EngineWaitsOfKernels, AreAddedUpByTheRankThatIsMissing) {
  const auto waited_ns = [&](std::uint32_t rank, std::uint32_t peer) {
    return group_->waits(rank).peers[peer].ready_ns.load();
  };
  run_and_check(0);
  ask_of(0, Op::kDispatch, 1);
  ASSERT_TRUE(waits_for_rank_1());
  EXPECT_TRUE(comes([&] { return waited_ns(0, 1) != 0 && waited_ns(0, 2) != 0; }));
  ask_of(1, Op::kDispatch, 1);
  ASSERT_TRUE(comes_to(0, abi::OpStage::kWaitReady, 2));
  look_away();
  const std::uint64_t for_1 = waited_ns(0, 1);
  const std::uint64_t for_2 = waited_ns(0, 2);
  EXPECT_TRUE(comes([&] { return waited_ns(0, 2) > for_2 && waited_ns(1, 2) != 0; }));
  EXPECT_EQ(waited_ns(0, 1), for_1) << "it is no longer missing";
  EXPECT_EQ(waited_ns(1, 0), 0u);
  ask_of(2, Op::kDispatch, 1);
  for (const std::uint32_t rank : {0u, 1u, 2u}) EXPECT_TRUE(comes_to_show(rank, 0)) << rank;
  EXPECT_EQ(waited_ns(2, 0) + waited_ns(2, 1), 0u);
}

// Rank 1 has told rank 0 alone that it takes part, and no more comes of it.
TEST_P(EngineWaits, NameTheRankThatHasNotArrived) {
  ask_of(0, Op::kDispatch, 1);
  ask_of(2, Op::kDispatch, 1);
  EXPECT_TRUE(comes_to(0, abi::OpStage::kWaitReady, 1));
  announce(1, 0, next_, 1);
  EXPECT_TRUE(comes_to(0, abi::OpStage::kWaitArrived, 1));
  EXPECT_TRUE(comes_to(2, abi::OpStage::kWaitReady, 1));
  look_away();
  EXPECT_TRUE(comes_to(0, abi::OpStage::kWaitArrived, 1));
}

// A call after another has not begun. A poll that was begun before it was seen says nothing of it.
TEST_P(EngineWaits, WhatWaitsForAnEarlierOneIsPlanning) {
  ask_of(0, Op::kDispatch, 0);
  ASSERT_TRUE(waits_for_rank_1());
  ask_of(0, Op::kDispatch, 1);
  ASSERT_TRUE(comes_to_show(0, 2));
  look_away();
  const auto all = shown(0);
  EXPECT_EQ(all[0].stage, abi::OpStage::kWaitReady);
  EXPECT_EQ(all[1].stage, abi::OpStage::kPlanning);
  EXPECT_EQ(all[1].waiting_for, -1);
}

// The calls that are shown are of the epoch: signals of the one before are older.
TEST_P(EngineWaits, TheNextEpochIsShownAnew) {
  for (int i = 0; i < 3; ++i) {
    ask_of(0, Op::kDispatch, 0);
    ASSERT_TRUE(waits_for_rank_1());
    break_and_resume(StatusCode::kAborted);
    ASSERT_FALSE(HasFatalFailure());
  }
}

// A dispatch counts the rows that a rank has received, a combine those that it has given back, whoever asks.
TEST_P(EngineWaits, BytesAreThoseOfTheRowsReceived) {
  std::vector<std::uint64_t> rows(kRanks);
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t slot = i % kShape.depth;
    const auto inputs = fill(slot);
    run(Op::kDispatch, slot, inputs);
    ASSERT_FALSE(HasFatalFailure());
    answer(slot, inputs);
    run(Op::kCombine, slot, inputs);
    ASSERT_FALSE(HasFatalFailure());
    const auto expected = reference::dispatch(params(), inputs);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) rows[rank] += expected[rank].num_recv_rows;
    if (i == 2) break_and_resume(StatusCode::kAborted);
  }
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    const auto& members = pages_[rank % 2].as<abi::EnginePage>()->members.rows;
    const auto its = [rank](const abi::StatisticsRow& row) {
      return row.key.load() != 0 && row.group_id.load() == kGroup && row.rank.load() == rank;
    };
    const auto row = std::find_if(std::begin(members), std::end(members), its);
    ASSERT_NE(row, std::end(members));
    const std::uint64_t bytes = rows[rank] * kShape.hidden * 2;
    EXPECT_TRUE(comes([&] { return row->bytes_combined.load() == bytes; })) << row->bytes_combined.load();
    EXPECT_EQ(row->bytes_dispatched.load(), bytes);
  }
}

// The times of dispatches and combines; one of them has waited for another rank.
TEST_P(EngineWaits, TimesCountFromWhereTheDeviceBegan) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  ask_of(0, Op::kDispatch, 1);
  ASSERT_TRUE(waits_for_rank_1());
  look_away();
  ask_of(1, Op::kDispatch, 1);
  ask_of(2, Op::kDispatch, 1);
  for (const std::uint32_t rank : {0u, 1u, 2u}) EXPECT_TRUE(comes_to_show(rank, 0)) << rank;
  const auto row_of = [this](std::uint32_t rank) {
    const auto& members = pages_[rank % 2].as<abi::EnginePage>()->members.rows;
    return std::find_if(std::begin(members), std::end(members), [rank](const abi::StatisticsRow& row) {
      return row.key.load() != 0 && row.group_id.load() == kGroup && row.rank.load() == rank;
    });
  };
  // Observations from `us` on.
  const auto observed = [&](std::uint32_t rank, std::uint32_t us) {
    const auto& buckets = row_of(rank)->ran.buckets;
    return std::accumulate(std::begin(buckets) + static_cast<std::ptrdiff_t>(abi::histogram_bucket(us)),
                           std::end(buckets), std::uint64_t{0});
  };
  for (const std::uint32_t rank : {0u, 1u, 2u})
    EXPECT_TRUE(comes([&] { return observed(rank, 0) == 7; })) << rank;
  EXPECT_GE(observed(0, 180'000), 1u) << "it waited for rank 1";
}

}  // namespace
}  // namespace epd::test
