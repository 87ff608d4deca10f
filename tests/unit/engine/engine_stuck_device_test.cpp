// A GPU that begins no kernel for a while, or whose streams write no word: nothing is lost, and breaks do not
// wait.
#include "engine_calls_fixture.h"

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
class EngineStuckDeviceTest : public EngineCallsFixture {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(fault_dir());
    EngineCallsFixture::SetUp();
    page_ = map_page(*engine_view_[0]);
  }
  void TearDown() override {
    std::filesystem::remove_all(fault_dir());
    EngineCallsFixture::TearDown();
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
    const auto numbers = ask(Op::kDispatch, slot, inputs);
    EXPECT_TRUE(takes_part(1, next_, 1)) << "its device is not stuck";
    EXPECT_TRUE(comes([&] { return times_stuck() == i; })) << times_stuck();
    end("stuck");
    await_ends(slot, numbers);
    ASSERT_FALSE(HasFatalFailure());
    check_rows(slot, inputs);
  }
  EXPECT_EQ(map_page(*engine_view_[1]).as<abi::EnginePage>()->times_stuck.load(), 0u);
}

// Gates that have not begun take nothing afterwards either.
TEST_F(EngineStuckDeviceTest, ABreakNeedsNoKernel) {
  run_and_check(0);
  begin("stuck");
  const auto numbers = ask(Op::kDispatch, 0, fill(0));
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
    auto numbers = ask(Op::kDispatch, slot, inputs);
    ASSERT_TRUE(takes_part(1, next_, 1)) << "it is alone on its device";
    for (const std::uint32_t at : {0u, 1u, 2u}) EXPECT_TRUE(tells_call(0, next_, at)) << at;
    EXPECT_FALSE(takes_part(0, next_, 0, 20));
    EXPECT_TRUE(kernels_.on(0).empty());
    there_ = {2};
    numbers[2] = ask(Op::kDispatch, slot, inputs)[2];
    there_ = {0, 1, 2};
    await_ends(slot, numbers);
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

// Words of the client's streams that the engine itself writes, while the control stream is held up.
class LaunchedHeldWordsTest : public EngineStuckDeviceTest {
 protected:
  LaunchedHeldWordsTest() { resident_ = false; }
  // Of rank 2, in its client's stream, which is not there yet. Returns the ticket.
  std::uint32_t submit_ahead(std::uint32_t slot, const std::vector<reference::RankInput>& inputs) {
    const auto ticket = static_cast<std::uint32_t>(random_());
    group_->stream_words(2, slot) = {ticket - 1, {}, ticket - 1};
    abi::Submission s = submission(2, Op::kDispatch, slot);
    s.flags = abi::kFlagStream;
    s.num_tokens = inputs[2].num_tokens;
    s.ticket = ticket;
    session(2).submit(s);
    return ticket;
  }
  // Of rank 2, whose `done` the engine then writes.
  std::uint32_t refuse_in_stream(std::uint32_t slot) {
    const auto ticket = static_cast<std::uint32_t>(random_() % 1'000'000 + 1);
    group_->stream_words(2, slot) = {ticket, {}, ticket - 1};
    abi::Submission s = submission(2, Op::kDispatch, slot);
    s.epoch = group_->epoch - 1;
    s.flags = abi::kFlagStream;
    s.ticket = ticket;
    session(2).submit(s);
    const auto done = session(2).wait();
    EXPECT_TRUE(done.has_value() && done->status != StatusCode::kOk);
    return ticket;
  }
  // The slot's next operation in a stream of rank 2's, and what is held meanwhile.
  void refuse_and_run(std::uint32_t slot) {
    break_and_resume(StatusCode::kEngineRestarted);
    ASSERT_FALSE(HasFatalFailure());
    run_and_check(slot);  // what is read once, behind the control stream, has been read
    ASSERT_FALSE(HasFatalFailure());
    begin("held");
    const std::uint32_t next = refuse_in_stream(slot) + 1;
    const auto inputs = fill(slot);
    group_->stream_words(2, slot).ready = next;
    abi::Submission s = submission(2, Op::kDispatch, slot);
    s.flags = abi::kFlagStream;
    s.num_tokens = inputs[2].num_tokens;
    s.ticket = next;
    session(2).submit(s);
    there_ = {0, 1};
    const auto numbers = ask(Op::kDispatch, slot, inputs);
    ::usleep(20'000);
    begin("stuck");
    std::uint32_t& word = group_->stream_words(2, slot).done;
    comes([&] { return std::atomic_ref(word).load() == next; }, 500);
    end("held");
    ::usleep(20'000);
    end("stuck");
    await_ends(slot, numbers);
    there_ = {0, 1, 2};
    ASSERT_FALSE(HasFatalFailure());
    const auto done = session(2).wait();
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->status, StatusCode::kOk);
    check_rows(slot, inputs);
    for (auto& engine : engines_) EXPECT_EQ(engine->stop(), 0);  // their streams have come to their ends
    EXPECT_EQ(word, next) << "the word fell back";
    engines_.clear();
  }
};

// A launched kernel does not come behind the control stream.
TEST_F(LaunchedHeldWordsTest, DoneDoesNotFallBackBehindTheNextOperation) {
  refuse_and_run(random_() % kShape.depth);
}

// The client may mark the slot's next operation ready as soon as it has heard of this one's end.
TEST_F(LaunchedHeldWordsTest, ReadyOfAnAbortedOperationIsWrittenBeforeTheGroupGoesOn) {
  const std::uint32_t slot = random_() % kShape.depth;
  const auto inputs = fill(slot);
  const std::uint32_t ticket = submit_ahead(slot, inputs);
  ASSERT_TRUE(comes([&] { return session(2).b().submission_head.value.load() == 1; }));
  ::usleep(20'000);  // it waits in the lane's stream
  begin("held");
  abi::Break message{};
  message.group_id = kGroup;
  message.epoch = group_->epoch;
  message.cause = StatusCode::kEngineRestarted;
  for (EngineThread* engine : engine_view_) engine->send(LinkType::kBreak, message);
  ASSERT_TRUE(engine_view_[1]->expect(LinkType::kBroken).has_value());
  std::atomic_ref(group_->stream_words(2, slot).ready).store(ticket);  // its stream comes there after all
  EXPECT_FALSE(engine_view_[0]->expect(LinkType::kBroken, 200).has_value())
      << "`ready` is still to be written, and would take back the next operation's";
  end("held");
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kBroken).has_value());
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(session(2).wait()->status, StatusCode::kEngineRestarted);
  group_->stream_words(2, slot).ready = ticket + 1;
  abi::Submission s = submission(2, Op::kDispatch, slot);
  s.flags = abi::kFlagStream;
  s.num_tokens = inputs[2].num_tokens;
  s.ticket = ticket + 1;
  session(2).submit(s);
  there_ = {0, 1};
  run(Op::kDispatch, slot, inputs);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(stream_goes_on(2, slot, ticket + 1));
  check_rows(slot, inputs);
}

// The group goes when the device has left it, and meanwhile the loop serves the others.
TEST_F(LaunchedHeldWordsTest, TheRemovalOfAGroupHoldsUpNobodyElse) {
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  abi::GroupShape alone = kShape;
  alone.num_ranks = 1;
  alone.num_experts = 2;
  const RawGroup beside(8, alone, "cuda", 1);
  beside.add_to_engine({engine_view_[0]}, {&other}, 0, false);
  submit_ahead(0, fill(0));
  ASSERT_TRUE(comes([&] { return session(2).b().submission_head.value.load() == 1; }));
  ::usleep(20'000);  // it waits in the lane's stream
  begin("held");
  engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{kGroup});
  abi::Submission noop = submission(0, Op::kNoop, 0);
  other.submit(noop);
  const auto served = other.wait(2000);
  ASSERT_TRUE(served.has_value()) << "the loop waits for the device";
  EXPECT_EQ(served->status, StatusCode::kOk);
  session(0).submit(submission(0, Op::kDispatch, 0));
  const auto refused = session(0).wait();
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->status, StatusCode::kAborted);
  EXPECT_FALSE(session(2).wait(0).has_value()) << "`ready` is still to be written";
  EXPECT_FALSE(engine_view_[0]->expect(LinkType::kGroupRemoved, 100).has_value());
  end("held");
  EXPECT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
  const auto done = session(2).wait();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->status, StatusCode::kAborted);
}

}  // namespace
}  // namespace epd::test
