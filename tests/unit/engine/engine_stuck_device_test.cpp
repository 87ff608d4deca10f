// A GPU that begins no kernel for a while, or whose streams write no word: nothing is lost, and breaks do not
// wait.
#include "engine_fixture.h"

#include "staying_kernels.h"

#include <gtest/gtest.h>
#include <unistd.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace epd::test {
namespace {

// The fake driver reads this once, when the first test asks it for something.
const std::string& fault_dir() {
  static const std::string dir = testing::TempDir() + "epd-stuck-" + std::to_string(::getpid());
  return dir;
}
[[maybe_unused]] const int g_told = ::setenv("EPD_FAKE_CUDA_FAULT_DIR", fault_dir().c_str(), 1);

// Ranks 0 and 2 are on device 0, rank 1 is on device 1.
class EngineStuckDeviceTest : public EngineFixture {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(fault_dir());
    EngineFixture::SetUp();
    page_ = map_page(*engine_view_[0]);
  }
  void TearDown() override {
    std::filesystem::remove_all(fault_dir());
    EngineFixture::TearDown();
  }

  // Device 0 begins no kernel: "stuck"; its streams write no word: "held".
  void begin(const std::string& what) { std::ofstream(fault_dir() + "/" + what + "-0").close(); }
  void end(const std::string& what) { std::filesystem::remove(fault_dir() + "/" + what + "-0"); }
  std::uint32_t times_stuck() const { return page_.as<abi::EnginePage>()->times_stuck.load(); }

  const StayingKernels kernels_;
  Mapping page_;
};

TEST_F(EngineStuckDeviceTest, WhatIsAskedForMeanwhileRunsAfterwards) {
  for (std::uint32_t i = 1; i <= 3; ++i) {
    const std::uint32_t slot = i % kShape.depth;
    run_and_check(slot);
    begin("stuck");
    const auto inputs = fill(slot);
    const auto numbers = ask(call_on(Op::kDispatch, slot), inputs);
    EXPECT_TRUE(takes_part(1, next_, 1)) << "its device is not stuck";
    EXPECT_TRUE(comes([&] { return times_stuck() == i; })) << times_stuck();
    end("stuck");
    await_ends(numbers);
    ASSERT_FALSE(HasFatalFailure());
    check_rows(slot, inputs);
  }
  EXPECT_EQ(map_page(*engine_view_[1]).as<abi::EnginePage>()->times_stuck.load(), 0u);
}

// Gates that have not begun take nothing afterwards either.
TEST_F(EngineStuckDeviceTest, ABreakNeedsNoKernel) {
  run_and_check(0);
  begin("stuck");
  const auto numbers = ask(call_on(Op::kDispatch, 0), fill(0));
  ASSERT_TRUE(takes_part(1, next_, 1));
  break_and_resume(StatusCode::kEngineRestarted);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_FALSE(ringers_[0].ended(numbers[0], 0));
  end("stuck");
  for (const std::uint32_t rank : {0u, 2u}) {
    EXPECT_TRUE(ringers_[rank].ended(numbers[rank]));
    EXPECT_EQ(ringers_[rank].end(numbers[rank]).ending, abi::CallEnding::kDiscarded);
  }
  for (std::uint32_t slot = 0; slot < kShape.depth; ++slot) run_and_check(slot);
}

TEST_F(EngineStuckDeviceTest, ACallThatNoKernelBeginsIsLateWhenItsTimeIsUp) {
  for (abi::Call brief : {dispatch_on(0), kNoopCall}) {
    brief.timeout_ms = 50;
    begin("stuck");
    const std::uint32_t number = ringers_[0].ring(brief, 0, group_->epoch);
    const auto request = engine_of(0).expect(LinkType::kBreakRequest);
    ASSERT_TRUE(request.has_value());
    const auto body = request->read<abi::Break>().value();
    EXPECT_EQ(body.cause, StatusCode::kDeadlineExceeded);
    EXPECT_EQ(body.failed_rank, 0);
    EXPECT_NE(std::string(body.text).find("begun no kernel of it"), std::string::npos) << body.text;
    break_and_resume(body.cause);
    ASSERT_FALSE(HasFatalFailure());
    end("stuck");
    EXPECT_TRUE(ringers_[0].ended(number));
    run_and_check(1);
  }
}

// Clients' kernels leave space for a gate, not for a main kernel. The engine was killed 3 s later, and with
// it all groups of the GPU.
TEST_F(EngineStuckDeviceTest, ABreakNeedsNoMainKernelThatHasNotBegun) {
  for (int i = 0; i < 2; ++i) {
    run_and_check(0);
    begin("taken");
    abi::Call brief = dispatch_on(1);
    brief.timeout_ms = 50;
    const std::uint32_t number = ringers_[0].ring(brief, 0, group_->epoch);
    ringers_[2].ring(brief, 0, group_->epoch);
    const auto request = engine_of(0).expect(LinkType::kBreakRequest);
    ASSERT_TRUE(request.has_value());
    break_and_resume(request->read<abi::Break>().value().cause);
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_FALSE(ringers_[0].ended(number, 0));
    end("taken");
    EXPECT_TRUE(ringers_[0].ended(number));
    EXPECT_EQ(ringers_[0].end(number).ending, abi::CallEnding::kFailed);
    run_and_check(1);
  }
}

// A call of the other ring was taken for one that no kernel begins, and broke the group when its own time was
// up.
TEST_F(EngineStuckDeviceTest, ACallBehindOneThatStandsIsNotLate) {
  run_and_check(0);
  const auto inputs = fill(1);
  there_ = {2};
  auto numbers = ask(call_on(Op::kDispatch, 1), inputs);
  for (const std::uint32_t at : {0u, 1u, 2u}) ASSERT_TRUE(tells_call(2, next_, at)) << at;
  Ringer stream(group_->words(2), group_->results(2));
  abi::Call brief = kNoopCall;
  brief.timeout_ms = 50;
  const std::uint32_t noop = stream.ring(brief, 0, group_->epoch);
  EXPECT_FALSE(engine_of(2).expect(LinkType::kBreakRequest, 1'300).has_value());
  for (const std::uint32_t rank : {0u, 1u}) {
    there_ = {rank};
    numbers[rank] = ask(call_on(Op::kDispatch, 1), inputs)[rank];
  }
  there_ = {0, 1, 2};
  await_ends(numbers);
  ASSERT_FALSE(HasFatalFailure());
  check_rows(1, inputs);
  EXPECT_TRUE(stream.ended(noop));
}

// No call comes by the control stream.
TEST_F(EngineStuckDeviceTest, CallsAreCarriedOutThoughTheControlStreamIsHeldUp) {
  for (std::uint32_t i = 0; i < 3; ++i) {
    begin("held");
    run_and_check(i % kShape.depth);
    end("held");
  }
}

// Rank 2 has yet to call it, which may need a kernel of the client's on the same GPU.
TEST_F(EngineStuckDeviceTest, ACallThatARankOfTheSameDeviceHasNotMadeHoldsNoKernel) {
  for (std::uint32_t i = 0; i < 3; ++i) {
    const std::uint32_t slot = i % kShape.depth;
    run_and_check(slot);
    const auto inputs = fill(slot);
    there_ = {0, 1};
    auto numbers = ask(call_on(Op::kDispatch, slot), inputs);
    ASSERT_TRUE(takes_part(1, next_, 1)) << "it is alone on its device";
    for (const std::uint32_t at : {0u, 1u, 2u}) EXPECT_TRUE(tells_call(0, next_, at)) << at;
    EXPECT_FALSE(takes_part(0, next_, 0, 20));
    EXPECT_TRUE(kernels_.on(0).empty());
    there_ = {2};
    numbers[2] = ask(call_on(Op::kDispatch, slot), inputs)[2];
    there_ = {0, 1, 2};
    await_ends(numbers);
    ASSERT_FALSE(HasFatalFailure());
    check_rows(slot, inputs);
  }
}

// The time of a call counts from when a gate has found it.
TEST_F(EngineStuckDeviceTest, ACallOfWhichTheTimeIsUpNamesTheRankOfTheSameDevice) {
  run_and_check(0);
  abi::Call brief = dispatch_on(1);
  brief.timeout_ms = 60;
  const std::uint32_t number = ringers_[0].ring(brief, 0, group_->epoch);
  ringers_[1].ring(dispatch_on(1), 0, group_->epoch);
  const auto request = engine_view_[0]->expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(body.failed_rank, 2);
  EXPECT_NE(std::string(body.text).find("ended after 60 ms"), std::string::npos) << body.text;
  EXPECT_TRUE(ringers_[0].ended(number));
  break_and_resume(body.cause);
  run_and_check(1);
}

// Rank 0 waits itself for rank 2, so rank 1, which is alone on its device, does not blame it.
TEST_F(EngineStuckDeviceTest, WhoWaitsForARankOfItsDeviceIsNotLate) {
  run_and_check(0);
  abi::Call brief = dispatch_on(1);
  brief.timeout_ms = 200;
  ringers_[0].ring(dispatch_on(1), 0, group_->epoch);
  ASSERT_TRUE(tells_call(0, next_, 1));
  ringers_[1].ring(brief, 0, group_->epoch);
  const auto request = engine_view_[1]->expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(body.failed_rank, 2) << body.text;
  break_and_resume(body.cause);
  run_and_check(1);
}

}  // namespace
}  // namespace epd::test
