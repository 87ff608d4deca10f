// A GPU that begins no kernel as long as some stay on it: these step aside, and nothing is lost.
#include "engine_commands_fixture.h"

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
class EngineStuckDeviceTest : public EngineCommandsFixture {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(fault_dir());
    EngineCommandsFixture::SetUp();
    page_ = map_page(*engine_view_[0]);
  }
  void TearDown() override {
    std::filesystem::remove_all(fault_dir());
    EngineCommandsFixture::TearDown();
  }

  // Device 0. Kernels that run something stay until it has ended.
  void stick(std::size_t kernels_left = 0) {
    std::ofstream(fault_dir() + "/stuck-0").close();
    EXPECT_TRUE(comes([&] { return kernels_.on(0).size() == kernels_left; }))
        << kernels_.on(0).size() << " kernels stay";
  }
  void unstick() {
    std::filesystem::remove(fault_dir() + "/stuck-0");
    EXPECT_TRUE(comes([&] { return kernels_.on(0).size() == 2; }))
        << kernels_.on(0).size() << " kernels stay";
  }
  std::uint32_t times_stuck() const { return page_.as<abi::EnginePage>()->times_stuck.load(); }

  const StayingKernels kernels_;
  Mapping page_;
};

TEST_F(EngineStuckDeviceTest, KernelsStepAsideAndComeBack) {
  run_and_check(0);
  for (std::uint32_t i = 1; i <= 3; ++i) {
    stick();
    EXPECT_EQ(kernels_.on(1).size(), 1u) << "another device";
    EXPECT_TRUE(comes([&] { return times_stuck() == i; })) << times_stuck();
    unstick();
    for (std::uint32_t slot = 0; slot < kShape.depth; ++slot) run_and_check(slot);
  }
  EXPECT_EQ(map_page(*engine_view_[1]).as<abi::EnginePage>()->times_stuck.load(), 0u);
}

TEST_F(EngineStuckDeviceTest, WhatIsAskedForMeanwhileRunsAfterwards) {
  for (std::uint32_t i = 0; i < 3; ++i) {
    const std::uint32_t slot = i % kShape.depth;
    run_and_check(slot);
    stick();
    const auto inputs = fill(slot);
    const auto numbers = ask(Op::kDispatch, slot, inputs);
    EXPECT_TRUE(takes_part(1, next_, 1)) << "its device is not stuck";
    unstick();
    await_ends(slot, numbers);
    ASSERT_FALSE(HasFatalFailure());
    check_rows(slot, inputs);
  }
}

// A kernel that is told to stop when it has gone by itself: nobody else may take that for his own.
TEST_F(EngineStuckDeviceTest, SharesOfSmsFollowWhatWasSetMeanwhile) {
  run_and_check(0);
  for (const std::uint32_t sms : {24u, 40u, 16u}) {
    stick();
    for (const std::uint32_t set : {sms + 8, sms})
      engine_view_[0]->send(LinkType::kSettings, abi::Settings{set, 5000, 20, 2});
    unstick();
    const auto all_sms = [&] {
      unsigned all = 0;
      for (const fake_cuda::StayingKernel& kernel : kernels_.on(0)) all += kernel.ctas;
      return all;
    };
    EXPECT_TRUE(comes([&] { return all_sms() == sms; })) << all_sms() << " of " << sms;
    run_and_check(0);
  }
}

TEST_F(EngineStuckDeviceTest, AnOperationThatWaitsForItsStreamWaitsOnInTheNextKernel) {
  for (std::uint32_t i = 0; i < 3; ++i) {
    const std::uint32_t slot = i % kShape.depth;
    const auto inputs = fill(slot);
    const auto ticket = static_cast<std::uint32_t>(random_());
    group_->stream_words(2, slot) = {ticket - 1, ticket - 1};
    abi::Submission s = submission(2, Op::kDispatch, slot);
    s.flags = abi::kFlagStream;
    s.num_tokens = inputs[2].num_tokens;
    s.ticket = ticket;
    session(2).submit(s);
    stick();
    unstick();
    std::atomic_ref(group_->stream_words(2, slot).ready).store(ticket, std::memory_order_release);
    there_ = {0, 1};
    run(Op::kDispatch, slot, inputs);
    there_ = {0, 1, 2};
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_TRUE(stream_goes_on(2, slot, ticket));
    const auto done = session(2).wait();
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->status, StatusCode::kOk);
    check_rows(slot, inputs);
  }
}

// What one of its GPU waits for is what another there would have to begin: it goes on when the GPU does.
TEST_F(EngineStuckDeviceTest, AKernelThatRunsSomethingEndsThatFirst) {
  run_and_check(0);
  const auto inputs = fill(0);
  there_ = {0};
  auto numbers = ask(Op::kDispatch, 0, inputs);
  ASSERT_TRUE(takes_part(0, next_, 0));
  stick(1);
  there_ = {1, 2};
  numbers[1] = ask(Op::kDispatch, 0, inputs)[1];
  std::filesystem::remove(fault_dir() + "/stuck-0");
  there_ = {0, 1, 2};
  await_ends(0, numbers);
  ASSERT_FALSE(HasFatalFailure());
  check_rows(0, inputs);
  for (std::uint32_t slot = 0; slot < kShape.depth; ++slot) run_and_check(slot);
}

}  // namespace
}  // namespace epd::test
