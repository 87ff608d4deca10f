// Groups whose operations are numbered near the places where tags begin anew (proto/README, "Numbers that
// wrap"), by calls on GPUs of the fake driver, and by submissions on host devices.

#include "engine_calls_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

class EngineWrapsTest : public EngineCallsFixture {
 protected:
  explicit EngineWrapsTest(std::uint64_t first_op = 2 * abi::kTagRound - 3, std::string kind = "cuda")
      : EngineCallsFixture({1, 1, 0}, std::move(kind)) {
    first_op_ = first_op;
  }

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
  explicit EngineRenewalTest(std::string kind = "cuda")
      : EngineWrapsTest(abi::kTagRound - 3, std::move(kind)) {}
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
  EngineSubmissionsRenewalTest() : EngineRenewalTest("host") {}
};

TEST_F(EngineSubmissionsRenewalTest, AnEpochWhoseNumbersRunOutIsBroken) {
  while (in_tags(next_) < abi::kTagRenewal && !HasFatalFailure()) run_and_check(next_ / 2 % kShape.depth);
  ASSERT_FALSE(HasFatalFailure());
  break_for_want_of_numbers();
  ASSERT_FALSE(HasFatalFailure());
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

}  // namespace
}  // namespace epd::test
