// Promises of gates: no ring of the bell is lost, and a gate that may not take a call leaves. On the fake
// driver.
#include "fake_cuda/watching.h"
#include "unit/fake_cuda/fake_cuda_call_world.h"
#include "unit/fake_cuda/fake_cuda_faults.h"

namespace epd::fake_cuda_test {
namespace {

// Ranks 0, 4 and 8 are on device 0.
class FakeCudaGates : public ::testing::Test {
 protected:
  void start(std::uint32_t ranks) {
    Case c;
    c.group.num_ranks = c.group.num_experts = ranks;
    c.group.hidden = 256;
    c.group.topk = 1;
    calls_ = std::make_unique<CallWorld>(shape_of(c, 8), 8);
    for (std::uint32_t r = 0; r < ranks; ++r) {
      calls_->open(r);
      calls_->resume(r, {});
    }
  }
  void TearDown() override {
    for (std::uint32_t r = 0; r < calls_->size(); ++r) calls_->close(r);
  }
  void call(std::uint32_t r, const abi::Call& call) { calls_->ring(r, call, {.waits = false}); }
  void noop() {
    call(0, CallWorld::noop());
    calls_->synchronise(0);
  }
  // All ranks but `first` of them do it too, and it ends well.
  void dispatch_with(const std::vector<std::uint32_t>& first) {
    for (std::uint32_t r = 0; r < calls_->size(); ++r) {
      if (std::find(first.begin(), first.end(), r) == first.end()) call(r, calls_->dispatch(0));
    }
    for (std::uint32_t r = 0; r < calls_->size(); ++r)
      EXPECT_EQ(calls_->journal(r).result.error, OpError::kNone) << "rank " << r;
  }
  // They begin operations only together.
  void share_device(std::uint32_t one, std::uint32_t other) {
    for (const std::uint32_t r : {one, other}) {
      calls_->own(r).view->group.together = 1u << (one + other - r);
      calls_->resume(r, {});
    }
  }
  // A dispatch of rank `r` that defers receiving. Returns when its gate has told of it and has left.
  void defer(std::uint32_t r) {
    calls_->dispatch_flags = abi::kFlagDefer;
    call(r, calls_->dispatch(0));
    calls_->dispatch_flags = 0;
    EXPECT_TRUE(stands(r)) << "rank " << r;
  }
  bool stands(std::uint32_t r) {
    return comes([&] {
      const CallRank& own = calls_->own(r);
      return now(own.state->called) == abi::op_tag(1, 0) && now(own.words->bell[0]) == 0 &&
             !calls_->inside(r);
    });
  }
  CallWords& words() { return *calls_->own(0).words; }

  const FaultDir faults_;
  std::unique_ptr<CallWorld> calls_;
};

TEST_F(FakeCudaGates, ABellThatRangBeforeItWasClearedIsNotLost) {
  start(1);
  FaultDir::begin("stuck-0", {kernels::cuda::kGateKernel});
  noop();
  noop();
  calls_->call_by_host(0, CallWorld::noop());
  EPD_CU(cuStreamSynchronize(calls_->own(0).control));
  EXPECT_EQ(now(words().bell[0]), 1u);
  EXPECT_EQ(now(words().bell[1]), 1u);
  FaultDir::end("stuck-0");
  EXPECT_TRUE(comes([&] { return now(words().done) == 2 && now(calls_->own(0).results->host_ended) == 1; }));
}

// Operations, unlike noops, end one gate's look each.
TEST_F(FakeCudaGates, AMainKernelRingsForCallsThatItsGateHasNotTaken) {
  start(1);
  FaultDir::begin("stuck-0", {kernels::cuda::kGateKernel});
  call(0, calls_->dispatch(0));
  call(0, calls_->combine(0));
  calls_->synchronise(0);
  calls_->call_by_host(0, calls_->dispatch(1));
  FaultDir::end("stuck-0");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(calls_->journal(0).result.tag, abi::op_tag(1, i));
}

TEST_F(FakeCudaGates, OneOfAnotherGenerationRingsAgainAndTakesNothing) {
  start(1);
  CallRank& own = calls_->own(0);
  calls_->enqueue_pairs(0, 5);
  std::atomic_ref(*own.generation).fetch_add(1);  // the next engine does
  own.open = false;
  noop();
  EPD_CU(cuStreamSynchronize(own.pairs));
  EXPECT_EQ(now(words().bell[0]), 1u);
  EXPECT_EQ(now(words().done), 0u);
  EXPECT_FALSE(calls_->inside(0));
  calls_->enqueue_pairs(0, 1);
  EXPECT_TRUE(comes([&] { return now(words().done) == 1; }));
}

TEST_F(FakeCudaGates, AllPairsOfAClosedLaneRunAfterOneRing) {
  start(1);
  CallRank& own = calls_->own(0);
  calls_->enqueue_pairs(0, 20);
  std::atomic_ref(own.state->leaves).store(1);
  own.open = false;
  noop();
  EPD_CU(cuStreamSynchronize(own.pairs));
  EXPECT_EQ(now(words().bell[0]), 1u);
  EXPECT_EQ(now(words().done), 1u);
  EXPECT_EQ(now(words().failed), 1u) << "a call of a lane that is closed";
}

TEST_F(FakeCudaGates, AHaltNeedsNoKernel) {
  start(1);
  FaultDir::begin("stuck-0");
  abi::Call by_client = CallWorld::noop();  // a kernel of the client's could not begin either
  by_client.epoch = 1;
  calls_->store(0, by_client);
  calls_->halt(0);
  EXPECT_EQ(now(words().done), 0u);
  EXPECT_NE(cuFakePending(calls_->own(0).pairs), 0u);
  FaultDir::end("stuck-0");
  EXPECT_TRUE(comes([&] { return now(words().done) == 1; }));
  EXPECT_EQ(now(words().failed), 1u);
}

// Clients hold all SMs: the gate fits beside them, the main kernel does not.
class FakeCudaGatesLinger : public FakeCudaGates, public ::testing::WithParamInterface<std::uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Us, FakeCudaGatesLinger, ::testing::Values(0u, 50'000u));

TEST_P(FakeCudaGatesLinger, AMainKernelThatHasNotBegunHoldsUpNoHaltAndRunsNothingAfterwards) {
  start(1);
  CallRank& own = calls_->own(0);
  std::atomic_ref(own.state->linger_us).store(GetParam());
  FaultDir::begin("taken-0");
  call(0, calls_->dispatch(0));
  const auto door = [&] { return now(own.lane->door[0]); };
  EXPECT_TRUE(comes([&] { return kernels::nothing_runs(door()) && door() != 0; }));
  EXPECT_EQ(now(own.state->index), 1u) << "it is taken";
  std::atomic_ref(own.lane->door[1]).store(own.enabled_epoch + 1);  // a halt
  calls_->resume(0, {.epoch = 2});
  FaultDir::end("taken-0");
  const JournalEntry left = calls_->journal(0);
  EXPECT_EQ(left.result.error, OpError::kNotBegun);
  EXPECT_EQ(left.index, 0u);
  EXPECT_TRUE(comes([&] { return now(words().done) == 1; }));
  EXPECT_EQ(now(words().failed), 0u) << "the client has heard of the break";
  call(0, calls_->dispatch(0));
  const JournalEntry next = calls_->journal(0);
  EXPECT_EQ(next.result.error, OpError::kNone);
  EXPECT_EQ(next.result.tag, abi::op_tag(2, 0));
  std::atomic_ref(own.state->linger_us).store(0);
  EXPECT_TRUE(comes([&] { return now(own.credits->held) == 0; }));
}

TEST_F(FakeCudaGates, LanesNeverHoldMoreSmsThanGuaranteesAndLimitAllow) {
  start(9);
  for (const std::uint32_t limit : {5u, 0u, 100u}) {
    calls_->own(0).credits->limit = limit;
    for (const std::uint32_t r : {0u, 4u, 8u}) {
      calls_->own(r).state->guaranteed_sms = 2;
      call(r, calls_->dispatch(0));
    }
    const std::vector<unsigned> held = limit == 5   ? std::vector{2u, 2u, 7u}
                                       : limit == 0 ? std::vector{2u, 2u, 2u}
                                                    : std::vector{kCtas, kCtas, kCtas};
    EXPECT_TRUE(comes([&] { return sms_of_kernels() == held; })) << testing::PrintToString(sms_of_kernels());
    dispatch_with({0, 4, 8});
    EXPECT_TRUE(comes([&] { return now(calls_->own(0).credits->held) == 0; }));
  }
}

TEST_F(FakeCudaGates, RanksOfOneDeviceBeginTogetherWhenTheLastHasCalled) {
  start(5);
  share_device(0, 4);
  call(0, calls_->dispatch(0));
  EXPECT_TRUE(stands(0));
  EXPECT_EQ(now(calls_->own(0).state->index), 0u) << "it has not begun";
  dispatch_with({0});
}

// The others begin at once. The last one to call rings those that wait.
TEST_F(FakeCudaGates, ADispatchThatDefersReceivingHoldsNoSmUntilAllHaveCalled) {
  for (const std::vector<std::uint32_t>& deferring : {std::vector{0u}, {0u, 2u}, {1u, 2u}, {0u, 1u, 2u}}) {
    SCOPED_TRACE(testing::PrintToString(deferring));
    start(4);
    for (const std::uint32_t r : deferring) defer(r);
    for (const std::uint32_t r : deferring) EXPECT_EQ(now(calls_->own(r).state->index), 0u) << "it has begun";
    EXPECT_TRUE(sms_of_kernels().empty());
    dispatch_with(deferring);
    for (std::uint32_t r = 0; r < calls_->size(); ++r) calls_->close(r);
  }
  start(2);
  defer(0);
  calls_->dispatch_flags = abi::kFlagDefer;
  dispatch_with({0});
}

TEST_F(FakeCudaGates, RanksThatShareADeviceAndOneThatDefersBegin) {
  for (const std::uint32_t deferring : {0u, 1u, 4u}) {
    SCOPED_TRACE(deferring);
    start(5);
    share_device(0, 4);
    defer(deferring);
    dispatch_with({deferring});
    for (std::uint32_t r = 0; r < calls_->size(); ++r) calls_->close(r);
  }
  start(1);
}

TEST_F(FakeCudaGates, ARankThatADeferredDispatchWaitsForIsNamedWhenTheTimeIsUp) {
  start(3);
  defer(0);
  call(1, calls_->dispatch(0));
  EXPECT_TRUE(comes([&] { return now(calls_->own(1).state->index) == 1; }));
  cuFakePassTime(60'000'000'000);
  calls_->ring_bell(0);
  const JournalEntry entry = calls_->journal(0);
  EXPECT_EQ(entry.result.error, OpError::kDeadline);
  EXPECT_EQ(entry.result.failed_rank, 2);
}

TEST_F(FakeCudaGates, ARankOfTheDeviceThatDoesNotCallIsNamedWhenTheTimeIsUp) {
  start(5);
  share_device(0, 4);
  call(0, calls_->dispatch(0));
  EXPECT_TRUE(
      comes([&] { return now(calls_->own(0).state->called) == abi::op_tag(1, 0) && !calls_->inside(0); }));
  cuFakePassTime(60'000'000'000);
  calls_->ring_bell(0);
  const JournalEntry entry = calls_->journal(0);
  EXPECT_EQ(entry.result.error, OpError::kDeadline);
  EXPECT_EQ(entry.result.failed_rank, 4);
}

TEST_F(FakeCudaGates, ACallThatStandsLetsNoCallOfTheOtherRingPass) {
  start(5);
  share_device(0, 4);
  call(0, calls_->dispatch(0));
  const CallRank& own = calls_->own(0);
  EXPECT_TRUE(comes([&] { return now(own.state->called) == abi::op_tag(1, 0) && !calls_->inside(0); }));
  calls_->call_by_host(0, CallWorld::noop());
  EXPECT_TRUE(comes([&] { return now(words().bell[1]) == 0 && !calls_->inside(0); }));
  EXPECT_EQ(now(own.results->host_ended), 0u);
  dispatch_with({0});
  EXPECT_TRUE(comes([&] { return now(own.results->host_ended) == 1; }));
}

// Pairs are enqueued only when a call stands and no kernel is left. So far fewer are needed than there are
// calls.
TEST_F(FakeCudaGates, AMainKernelThatLingersTakesTheNextCalls) {
  constexpr std::uint32_t kCalls = 40;
  start(1);
  CallRank& own = calls_->own(0);
  own.open = false;
  std::atomic_ref(own.state->linger_us).store(50'000);
  std::uint32_t pairs = 0;
  for (std::uint32_t i = 0; i < kCalls; ++i) {
    if (i == kCalls / 2) {  // a break
      calls_->halt(0);
      calls_->resume(0, {.epoch = 2});
    }
    call(0, calls_->dispatch(i % 2));
    const JournalEntry& entry = own.host->journal[own.read];
    EXPECT_TRUE(comes([&] {
      if (now(entry.number) == own.read + 1) return true;
      if (cuFakePending(own.pairs) == 0) calls_->enqueue_pairs(0, 1), ++pairs;
      return false;
    }));
    EXPECT_EQ(calls_->journal(0).result.error, OpError::kNone);
  }
  EXPECT_LT(pairs, kCalls);
  std::atomic_ref(own.state->linger_us).store(0);
  cuFakePassTime(60'000'000);
  EXPECT_TRUE(comes([&] { return now(own.credits->held) == 0 && sms_of_kernels().empty(); }));
}

TEST_F(FakeCudaGates, AMainKernelThatLingersLeavesWhenTheDeviceDrains) {
  start(1);
  CallRank& own = calls_->own(0);
  own.open = false;
  std::atomic_ref(own.state->linger_us).store(50'000);
  calls_->enqueue_pairs(0, 1);
  call(0, calls_->dispatch(0));
  const JournalEntry& entry = own.host->journal[own.read];
  EXPECT_TRUE(comes([&] { return now(entry.number) == own.read + 1; }));
  std::atomic_ref(own.state->drains).store(1);
  EXPECT_TRUE(comes([&] { return now(own.credits->held) == 0 && sms_of_kernels().empty(); }));
}

}  // namespace
}  // namespace epd::fake_cuda_test
