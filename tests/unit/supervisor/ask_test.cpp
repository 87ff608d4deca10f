// Asking the supervisor's loop from another thread: a caller hears what came of it, or it does not happen.
#include "ask.h"

#include <gtest/gtest.h>
#include <atomic>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>

namespace epd::supervisor {
namespace {

class Ask : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Loop>> loop = Loop::create(loop_clock_);
    ASSERT_TRUE(loop.ok());
    loop_ = std::move(*loop);
    thread_ = std::thread([this] { loop_->run([] { return std::numeric_limits<std::uint64_t>::max(); }); });
  }
  void TearDown() override {
    hold_.store(false);
    loop_->post([this] { loop_->stop(); });
    thread_.join();
  }
  // Holds the loop until hold_ is false.
  void hold() {
    hold_.store(true);
    loop_->post([this] {
      held_.store(true);
      while (hold_.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    while (!held_.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // Once this returns, the loop has done what was posted before.
  void catch_up() {
    hold_.store(false);
    ASSERT_TRUE(ask<bool>(*loop_, [] { return true; }).ok());
  }

  const MonotonicClock clock_;
  LoopClock loop_clock_{clock_};
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
  std::atomic<bool> hold_{false};
  std::atomic<bool> held_{false};
  std::atomic<int> done_{0};
};

TEST_F(Ask, IsAnswered) {
  const Result<int> answer = ask<int>(*loop_, [] { return 7; });
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer.value(), 7);
}

// A drain that "failed" with DEADLINE_EXCEEDED came all the same, later.
TEST_F(Ask, WhatTimedOutIsNotCarriedOutLater) {
  hold();
  const Result<int> answer = ask<int>(*loop_, [this] { return ++done_; });
  EXPECT_EQ(answer.status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(answer.status().message().find("nothing was done"), std::string::npos);
  catch_up();
  EXPECT_EQ(done_.load(), 0);
}

TEST_F(Ask, WhatWasCancelledIsNotCarriedOutLater) {
  hold();
  std::atomic<bool> gone{false};
  std::thread canceller([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gone.store(true);
  });
  const Result<int> answer = ask<int>(
      *loop_, [this] { return ++done_; }, [&] { return gone.load(); });
  canceller.join();
  EXPECT_FALSE(answer.ok());
  catch_up();
  EXPECT_EQ(done_.load(), 0);
  EXPECT_FALSE(ask<int>(
                   *loop_, [this] { return ++done_; }, [] { return true; })
                   .ok());
  catch_up();
  EXPECT_EQ(done_.load(), 0) << "its caller had gone before it asked";
}

// The caller's time is over while the loop has it in hand: then it gets the outcome.
TEST_F(Ask, WhatHasBegunIsAnsweredThoughTheTimeIsOver) {
  std::atomic<bool> begun{false};
  const Result<int> answer = ask<int>(
      *loop_,
      [&] {
        begun.store(true);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        return ++done_;
      },
      [&] { return begun.load(); });
  ASSERT_TRUE(answer.ok()) << answer.status().to_string();
  EXPECT_EQ(done_.load(), 1);
}

TEST_F(Ask, WhatThrowsIsAnErrorAndTheLoopGoesOn) {
  const Result<int> answer = ask<int>(*loop_, []() -> int { throw std::bad_alloc(); });
  EXPECT_EQ(answer.status().code(), StatusCode::kInternal);
  loop_->post([] { throw std::runtime_error("posted"); });
  loop_->post([] { throw 7; });
  EXPECT_TRUE(ask<bool>(*loop_, [] { return true; }).ok());
}

TEST_F(Ask, ALoopThatStopsLeavesNobodyWaiting) {
  hold();
  std::thread stopper([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    hold_.store(false);
  });
  loop_->post([this] { loop_->stop(); });
  const Result<int> answer = ask<int>(*loop_, [] { return 7; });
  stopper.join();
  EXPECT_TRUE(answer.ok() || answer.status().code() == StatusCode::kAborted) << answer.status().to_string();
  while (ask<int>(*loop_, [] { return 7; }).ok()) {
  }
  EXPECT_EQ(ask<int>(*loop_, [] { return 7; }).status().code(), StatusCode::kAborted);
}

}  // namespace
}  // namespace epd::supervisor
