// Groups whose operations are numbered near the places where tags begin anew (proto/README, "Numbers that
// wrap"), on host devices and, by calls and by submissions, on GPUs of the fake driver.

#include "engine_calls_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

class EngineWrapsTest : public EngineCallsFixture {
 protected:
  explicit EngineWrapsTest(std::uint64_t first_op = 2 * abi::kTagRound - 3) { first_op_ = first_op; }

  void break_for_want_of_numbers() {
    std::optional<Packet> request;
    ASSERT_TRUE(comes([&] {
      for (EngineThread* engine : engine_view_) {
        if (!request) request = engine->expect(LinkType::kBreakRequest, 1);
      }
      return request.has_value();
    }));
    const auto body = request->read<abi::Break>().value();
    EXPECT_EQ(body.cause, StatusCode::kAborted);
    EXPECT_EQ(body.failed_rank, -1);
    EXPECT_NE(std::string(body.text).find("epoch 1 has no numbers left after"), std::string::npos)
        << body.text;
    break_and_resume(body.cause);
  }
};

// B7: tags had 40 bits of the number itself, so from 2^40 - 1 on they were less than those before, and no
// operation ever got its own.
TEST_F(EngineWrapsTest, OperationsGoOnPastFortyBits) {
  for (std::uint32_t i = 0; i < 8; ++i) run_and_check(i % kShape.depth);
  // The engine reads of calls a little later.
  EXPECT_TRUE(comes([&] { return group_->board(0).next_index.load() == first_op_ + 16; }))
      << group_->board(0).next_index.load() << ", not " << first_op_ + 16;
}

// What stands in the records was counted from another base.
TEST_F(EngineWrapsTest, RoutingsOutliveABreakAfterWhichTagsBeginAnew) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  const auto inputs = fill(1);
  run(Op::kDispatch, 1, inputs);
  const auto answers = answer(1, inputs);
  ASSERT_EQ(in_tags(next_), abi::kTagRound + 4) << "counted from the old base";
  const std::uint64_t dispatch = next_ - 1;
  for (std::uint32_t i = 0; i < 4; ++i) {
    break_and_resume(StatusCode::kEngineRestarted);
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_EQ(in_tags(next_), 4 + i) << "and from the new one";
    run(Op::kCombine, 1, inputs, dispatch);
    ASSERT_FALSE(HasFatalFailure());
    check_sums(1, inputs, answers);
  }
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

// A dispatch that some ranks have completed and others not is done again: what it left in the records must
// not be taken for what stands.
TEST_F(EngineWrapsTest, ADispatchThatWasUndoneAsTagsBeganAnewIsForgotten) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  const auto answers = answer(0, inputs);
  const std::uint64_t dispatch = next_ - 1;
  run(Op::kCombine, 0, inputs);
  const auto undone = fill(0);
  run(Op::kDispatch, 0, undone);
  ASSERT_FALSE(HasFatalFailure());
  break_all(StatusCode::kEngineRestarted);
  ASSERT_FALSE(HasFatalFailure());
  next_ -= 2;
  group_->resume_index = next_;
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  run(Op::kCombine, 0, inputs, dispatch);
  ASSERT_FALSE(HasFatalFailure());
  check_sums(0, inputs, answers);
  run_and_check(0);
}

class EngineRenewalTest : public EngineWrapsTest {
 protected:
  EngineRenewalTest() : EngineWrapsTest(abi::kTagRound - 3) {}
};

// An epoch that has lasted for so many operations is ended before its tags are at an end.
TEST_F(EngineRenewalTest, AnEpochWhoseNumbersRunOutIsBroken) {
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  const auto answers = answer(0, inputs);
  const std::uint64_t dispatch = next_ - 1;
  while (in_tags(next_) < abi::kTagRenewal && !HasFatalFailure()) run(Op::kCombine, 0, inputs, dispatch);
  ASSERT_FALSE(HasFatalFailure());
  break_for_want_of_numbers();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(next_, abi::kTagRenewal);
  EXPECT_EQ(in_tags(next_), abi::kTagRenewal - abi::kTagRound);
  run(Op::kCombine, 0, inputs, dispatch);
  ASSERT_FALSE(HasFatalFailure());
  check_sums(0, inputs, answers);
  run_and_check(1);
}

// The same of ranks that all submit.
class EngineSubmissionsRenewalTest : public EngineRenewalTest {
 protected:
  EngineSubmissionsRenewalTest() { resident_ = false; }
};

TEST_F(EngineSubmissionsRenewalTest, AnEpochWhoseNumbersRunOutIsBroken) {
  while (in_tags(next_) < abi::kTagRenewal && !HasFatalFailure()) run_and_check(next_ / 2 % kShape.depth);
  ASSERT_FALSE(HasFatalFailure());
  break_for_want_of_numbers();
  ASSERT_FALSE(HasFatalFailure());
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

class EngineTicketsTest : public EngineCallsFixture {
 protected:
  EngineTicketsTest() { resident_ = false; }

  // Refused before it is launched, as of an epoch that has gone: the engine itself writes `done`.
  void refuse_in_stream(std::uint64_t ticket) {
    abi::Submission s = submission(0, Op::kDispatch, 0);
    s.epoch = group_->epoch - 1;
    s.flags = abi::kFlagStream;
    s.ticket = ticket;
    session(0).submit(s);
    const auto done = session(0).wait();
    ASSERT_TRUE(done.has_value());
    EXPECT_NE(done->status, StatusCode::kOk);
    EXPECT_TRUE(stream_goes_on(0, 0, static_cast<std::uint32_t>(ticket))) << ticket;
  }
};

// B4: of what it had written there the engine kept 32 bits, and nothing but failures renewed them. So what
// failed between 2^31 and 2^32 tickets later was taken for something that lay behind, and its stream waited
// for ever.
TEST_F(EngineTicketsTest, AStreamGoesOnAfterAFailureHoweverLongAgoTheLastOneWas) {
  break_and_resume(StatusCode::kEngineRestarted);
  ASSERT_FALSE(HasFatalFailure());
  std::uint64_t ticket = 1 + random_() % 1000;
  for (const std::uint32_t bits : {1, 31, 32, 33, 39, 40}) {
    refuse_in_stream(ticket);
    ASSERT_FALSE(HasFatalFailure());
    const std::uint64_t later = ticket + (std::uint64_t{1} << bits) + random_() % 1000;
    // Operations that ended well have brought it here.
    group_->stream_words(0, 0).done = static_cast<std::uint32_t>(later - 1);
    refuse_in_stream(later);
    ASSERT_FALSE(HasFatalFailure());
    ticket = later + 1;
  }
}

}  // namespace
}  // namespace epd::test
