// HostCalls alone: two ranks of a group whose lanes the test turns, step by step.
#include "host_calls.h"

#include "device_operation.h"
#include "engine_harness.h"
#include "group.h"

#include <gtest/gtest.h>
#include <array>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace epd::test {
namespace {

using abi::CallEnding;
using abi::Op;
using abi::OpStage;
using device::HostCalls;
using kernels::JournalEntry;
using kernels::OpError;

constexpr abi::GroupShape kShape{2, 4, 8, 128, 2, 2, {}, {}, {}};
constexpr std::uint32_t kRanks = 2;

class Memory final : public device::Arena {
 public:
  static std::shared_ptr<Memory> of(std::uint64_t bytes) {
    const UniqueFd fd = make_sealed_memfd("test", bytes).value();
    return std::make_shared<Memory>(Mapping::map(fd.get(), bytes, Access::kReadWrite).value());
  }
  explicit Memory(Mapping mapping) : Arena(mapping.bytes()), mapping_(std::move(mapping)) {}

 private:
  Mapping mapping_;
};

abi::GroupBegin begin_of(const abi::GroupShape& shape) {
  abi::GroupBegin begin{};
  begin.shape = shape;
  return begin;
}

class HostCallsTest : public ::testing::Test, private device::CallGroup {
 protected:
  HostCallsTest() : group_(begin_of(kShape), nullptr) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      engine::GroupRankMemory& memory = group_.ranks[rank];
      memory.user = Memory::of(abi::UserArenaLayout(kShape).total_bytes);
      memory.exchange = Memory::of(abi::ExchangeArenaLayout(kShape).total_bytes);
      memory.place_regions(kShape);
      memory.set_active(1);
      results_.push_back(Memory::of(abi::ResultsLayout(kShape).total_bytes));
      plans_.push_back(std::make_unique<device::HostPlans>(4));
      calls_.resize(kRanks);
      open(rank);
      ringers_.emplace_back(words(rank), results(rank), true);
    }
  }

  abi::CallWords& words(std::uint32_t rank) const {
    return *reinterpret_cast<abi::CallWords*>(group_.ranks[rank].call_words());
  }
  abi::Results& results(std::uint32_t rank) const {
    return *reinterpret_cast<abi::Results*>(results_[rank]->bytes());
  }
  // As a new engine does.
  void open(std::uint32_t rank) {
    calls_[rank] = std::make_unique<HostCalls>(engine::lane_shape(kShape, 0),
                                               HostCalls::Needs{sms_, *plans_[rank], priority_, clock_});
    calls_[rank]->open({group_.ranks[rank].call_words(),
                        group_.ranks[rank].user,
                        results_[rank],
                        abi::ResultsLayout(kShape).counts_stride,
                        nullptr,
                        1,
                        this,
                        {&counts_[rank], waits_[rank]}});
    calls_[rank]->set_limits({0, 1000, 0});
  }
  void resume(std::uint32_t rank) {
    const std::vector<kernels::RouteState> routes(kShape.num_routes());
    const kernels::GroupView view = engine::group_view(group_, rank);
    const auto peers = engine::peer_views(group_);
    const kernels::MemoryTable memories = engine::memory_table(group_);
    calls_[rank]->resume({epoch_, next_, 0, 0, routes, view, peers, memories, {}});
  }
  void resume_all() {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) resume(rank);
  }
  // Until both wait.
  void turn() {
    for (bool progress = true; progress;) {
      progress = false;
      for (auto& calls : calls_) progress |= calls->advance();
    }
  }
  void turn(std::uint32_t rank) {
    while (calls_[rank]->advance()) continue;
  }
  OpStage stage(std::uint32_t rank) const { return calls_[rank]->running()->stage(); }
  std::uint32_t ring(std::uint32_t rank, const abi::Call& call, std::uint32_t num_tokens = 0) {
    return ringers_[rank].ring(call, num_tokens, epoch_);
  }
  bool ended(std::uint32_t rank, std::uint32_t number) { return ringers_[rank].ended(number, 0); }
  CallEnding ending(std::uint32_t rank, std::uint32_t number) { return ringers_[rank].end(number).ending; }
  // All that is in the journal.
  std::vector<JournalEntry> journal(std::uint32_t rank) {
    std::vector<JournalEntry> all;
    for (; calls_[rank]->front() != nullptr; calls_[rank]->pop()) all.push_back(*calls_[rank]->front());
    return all;
  }
  // Both ranks dispatch and combine.
  void work() {
    for (const Op op : {Op::kDispatch, Op::kCombine}) {
      const std::uint32_t first = ring(0, call_on(op, 0), op == Op::kDispatch ? 3 : 0);
      const std::uint32_t second = ring(1, call_on(op, 0));
      turn();
      ASSERT_TRUE(ended(0, first) && ended(1, second));
      ASSERT_EQ(ending(0, first), CallEnding::kCarriedOut);
      ASSERT_EQ(ending(1, second), CallEnding::kCarriedOut);
      ASSERT_EQ(ringers_[0].end(first).index, next_++);
    }
  }

  // CallGroup
  bool may_begin() const override { return may_begin_; }
  std::span<const std::uint8_t> masked() const override { return {}; }
  bool holds_rows(std::uint32_t, std::uint64_t) const override { return true; }
  void ring_peers() const override {}
  void ring_client() const override { ++rung_; }

  engine::Group group_;
  ManualClock clock_;
  device::HostSms sms_{[] {}};
  const std::int32_t priority_ = 0;
  std::vector<std::shared_ptr<device::Arena>> results_;
  std::vector<std::unique_ptr<device::HostPlans>> plans_;
  std::array<abi::RankCounts, kRanks> counts_{};
  abi::PeerWait waits_[kRanks][kRanks] = {};
  std::vector<std::unique_ptr<HostCalls>> calls_;
  std::vector<Ringer> ringers_;
  std::uint64_t epoch_ = 1;
  std::uint64_t next_ = 0;
  bool may_begin_ = true;
  mutable int rung_ = 0;
};

TEST_F(HostCallsTest, EndInOrderAndAreInTheJournal) {
  resume_all();
  const std::uint32_t noop = ring(0, kNoopCall);
  const std::uint32_t first = ring(0, dispatch_on(1), 3);
  const std::uint32_t second = ring(0, combine_on(1));
  turn();
  EXPECT_EQ(ending(0, noop), CallEnding::kCarriedOut);
  EXPECT_EQ(ringers_[0].done(), first) << "which waits for rank 1";
  EXPECT_EQ(rung_, 1);
  ring(1, dispatch_on(1));
  turn();
  EXPECT_EQ(ringers_[0].end(first).num_recv_rows, 3u) << "choices are 0";
  EXPECT_EQ(ringers_[0].done(), second);
  ring(1, combine_on(1));
  turn();
  EXPECT_EQ(ringers_[0].end(second).index, 1u);
  EXPECT_EQ(ringers_[0].failed(), 0u);
  const auto entries = journal(0);
  ASSERT_EQ(entries.size(), 3u);
  for (std::uint32_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(abi::unpack(entries[i].call).number, i);
    EXPECT_EQ(entries[i].index, i == 2 ? 1u : 0u);
    EXPECT_EQ(entries[i].ring, kernels::kByHost);
    EXPECT_EQ(entries[i].result.error, OpError::kNone);
  }
}

// Rank 1 has announced itself and does no more.
TEST_F(HostCallsTest, CountsAndSentInputsAreToldBeforeTheEnd) {
  resume_all();
  abi::Call call = dispatch_on(1);
  call.flags = abi::kFlagDefer;
  const std::uint32_t number = ring(0, call, 3);
  ring(1, call);
  turn(0);
  turn(1);
  ASSERT_EQ(stage(1), OpStage::kWaitArrived);
  for (int i = 0; i < 1000 && calls_[0]->running() != nullptr && stage(0) != OpStage::kWaitArrived; ++i)
    calls_[0]->advance();
  const std::uint32_t mark = abi::result_of(number, 0) + 1;
  const abi::ResultsLayout layout(kShape);
  const auto* counts =
      reinterpret_cast<const std::uint64_t*>(results_[0]->bytes() + layout.counts + layout.counts_stride);
  const abi::PlacementParts parts(kShape);
  for (std::uint64_t i = 0; i < parts.words; ++i) EXPECT_EQ(counts[i] >> 32, mark) << i;
  EXPECT_EQ(static_cast<std::uint32_t>(counts[parts.expert_counts]), 6u) << "two choices each";
  EXPECT_EQ(results(0).sent[1], mark);
  EXPECT_FALSE(ended(0, number));
  turn();
  EXPECT_EQ(ending(0, number), CallEnding::kCarriedOut);
}

TEST_F(HostCallsTest, TheDeadlineNamesTheRankThatIsAwaited) {
  resume_all();
  abi::Call call = dispatch_on(0);
  call.timeout_ms = 50;
  const std::uint32_t number = ring(0, call);
  EXPECT_EQ(calls_[0]->deadline_ns(), ~std::uint64_t{0});
  turn(0);
  EXPECT_EQ(calls_[0]->deadline_ns(), clock_.now_ns() + 50'000'000);
  clock_.advance_ms(49);
  turn(0);
  EXPECT_FALSE(ended(0, number));
  clock_.advance_ms(1);
  turn(0);
  EXPECT_EQ(ending(0, number), CallEnding::kFailed);
  const std::uint32_t later = ring(0, dispatch_on(1));
  turn(0);
  EXPECT_EQ(ending(0, later), CallEnding::kDiscarded) << "until the group goes on";
  EXPECT_EQ(ringers_[0].failed(), 2u);
  const auto entries = journal(0);
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].result.error, OpError::kDeadline);
  EXPECT_EQ(entries[0].result.failed_rank, 1);
}

// A halt ends the operation wherever it is, and the next epoch begins it again.
TEST_F(HostCallsTest, AreHaltedAtEachStepAndResumed) {
  bool whole = false;
  for (int steps = 0; !whole; ++steps) {
    ASSERT_LT(steps, 1000);
    SCOPED_TRACE(steps);
    resume_all();
    const std::uint32_t number = ring(0, dispatch_on(0), 3);
    ring(1, dispatch_on(0));
    for (int i = 0; i < steps && !whole; ++i)
      whole = !calls_[i % 2]->advance() && !calls_[1 - i % 2]->advance();
    for (auto& calls : calls_) {
      calls->halt();
      EXPECT_TRUE(calls->halted());
      EXPECT_EQ(calls->running(), nullptr);
    }
    turn();
    ASSERT_TRUE(ended(0, number));
    const auto entries = journal(0);
    EXPECT_TRUE(!whole || ending(0, number) == CallEnding::kCarriedOut);
    if (entries.empty()) {
      EXPECT_EQ(ending(0, number), CallEnding::kDiscarded);
    } else {
      const bool well = entries[0].result.error == OpError::kNone;
      EXPECT_EQ(ending(0, number), well ? CallEnding::kCarriedOut : CallEnding::kFailed);
      EXPECT_TRUE(well || entries[0].result.error == OpError::kAborted);
    }
    const std::uint32_t late = ring(0, kNoopCall);
    turn();
    EXPECT_EQ(ending(0, late), CallEnding::kDiscarded);
    ++epoch_;
    resume_all();
    work();
    ASSERT_FALSE(HasFatalFailure());
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      journal(rank);
      calls_[rank]->halt();
    }
    ++epoch_;
  }
}

// All have completed it, and the break comes before this rank has seen that.
TEST_F(HostCallsTest, WhatEveryRankHasCompletedEndsWellThoughItIsHalted) {
  resume_all();
  const std::uint32_t number = ring(0, dispatch_on(0));
  ring(1, dispatch_on(0));
  turn(0);
  turn(1);
  for (int i = 0; i < 1000 && stage(0) != OpStage::kWaitArrived; ++i) calls_[0]->advance();
  turn(1);
  ASSERT_EQ(calls_[1]->running(), nullptr);
  calls_[0]->halt();
  EXPECT_EQ(ending(0, number), CallEnding::kCarriedOut);
}

TEST_F(HostCallsTest, CallsOfAnotherEpochAreDiscarded) {
  epoch_ = 2;
  resume_all();
  const std::uint32_t early = ringers_[0].ring(dispatch_on(0), 0, 1);
  turn();
  EXPECT_EQ(ending(0, early), CallEnding::kDiscarded);
  EXPECT_TRUE(journal(0).empty());
  work();
}

TEST_F(HostCallsTest, WaitForEnginesOfOtherNodes) {
  may_begin_ = false;
  resume_all();
  const std::uint32_t noop = ring(0, kNoopCall);
  EXPECT_FALSE(calls_[0]->can_advance());
  turn();
  EXPECT_FALSE(ended(0, noop));
  may_begin_ = true;
  EXPECT_TRUE(calls_[0]->can_advance());
  turn();
  EXPECT_EQ(ending(0, noop), CallEnding::kCarriedOut);
}

// Numbers of calls and of results are cyclic.
TEST_F(HostCallsTest, AnotherEngineGoesOnWhereTheRingStandsPastTheLastNumber) {
  for (const std::uint32_t rank : {0u, 1u}) {
    for (std::uint32_t number = 0u - 3 - abi::kCallSlots; number != 0u - 3; ++number) {
      abi::Call before = kNoopCall;
      before.number = number;
      store_call(words(rank).host_calls, before);
    }
    results(rank).host_ended = 0u - 3;
    ringers_[rank].skip(0u - 3);
    open(rank);
  }
  resume_all();
  work();
  open(0);
  resume(0);
  for (int i = 0; i < 3; ++i) work();
  EXPECT_EQ(results(0).host_ended, 5u);
  EXPECT_EQ(words(0).failed, 0u);
}

// Each word is read once: whatever is carried out is within the limits. Words that are of no call end none.
TEST_F(HostCallsTest, AClientMayScribbleOverItsRingWhileItIsRead) {
  std::atomic<bool> stop{false};
  std::atomic<std::uint32_t> number{0};
  std::thread client([&] {
    std::mt19937 random(std::random_device{}());
    abi::Call call = kNoopCall;
    call.epoch = 1;
    const abi::PackedCall noop = abi::pack(abi::halves_of(call), 0);
    while (!stop) {
      const std::uint32_t next = number + random() % 3;
      abi::PackedCall& place = words(0).host_calls[next % abi::kCallSlots];
      for (std::uint32_t i = 0; i < abi::PackedCall::kWords; ++i) {
        const std::uint64_t upper = random() % 16 == 0 ? random() : next + 1;
        const std::uint64_t lower = random() % 4 == 0 ? random() : noop.words[i];
        std::atomic_ref(place.words[i]).store(upper << 32 | static_cast<std::uint32_t>(lower));
      }
    }
  });
  const abi::OpLimits limits = abi::op_limits(kShape);
  int carried_out = 0;
  int refused = 0;
  while (carried_out < 100 || refused < 100) {
    resume(0);
    for (int i = 0; i < 20; ++i) calls_[0]->advance();
    calls_[0]->halt();
    for (const JournalEntry& entry : journal(0)) {
      const bool legal = abi::bad_field(abi::unpack(entry.call).request(), limits) == abi::BadField::kNone;
      EXPECT_TRUE(legal || entry.result.error == OpError::kBadCall ||
                  entry.result.error == OpError::kLostCall);
      ++(entry.result.error == OpError::kNone ? carried_out : refused);
    }
    number = ringers_[0].done();
  }
  stop = true;
  client.join();
}

}  // namespace
}  // namespace epd::test
