// Groups whose operations are numbered near the places where tags begin again (proto/README, "Numbers that
// wrap").

#include "engine_fixture.h"

#include <gtest/gtest.h>

namespace epd::test {
namespace {

class EngineWrapsTest : public EngineOfEachKind {
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
INSTANTIATE_TEST_SUITE_P(Kinds, EngineWrapsTest, kinds(), kind_name);

// B7: tags had 40 bits of the number itself, so from 2^40 - 1 on they were less than those before, and no
// operation ever got its own.
TEST_P(EngineWrapsTest, OperationsGoOnPastFortyBits) {
  for (std::uint32_t i = 0; i < 8; ++i) run_and_check(i % kShape.depth);
  // The engine reads of calls a little later.
  EXPECT_TRUE(comes([&] { return group_->board(0).next_index.load() == first_op_ + 16; }))
      << group_->board(0).next_index.load() << ", not " << first_op_ + 16;
}

// The numbers in the records were counted from another base.
TEST_P(EngineWrapsTest, RoutingsOutliveABreakAfterWhichTagsBeginAnew) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  const auto inputs = fill(1);
  run(Op::kDispatch, 1, inputs);
  const auto answers = answer(1, inputs);
  ASSERT_EQ(in_tags(next_), abi::kTagRound + 4) << "counted from the old base";
  for (std::uint32_t i = 0; i < 4; ++i) {
    break_and_resume(StatusCode::kEngineRestarted);
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_EQ(in_tags(next_), 4 + i) << "and from the new one";
    run(Op::kCombine, 1, inputs);
    ASSERT_FALSE(HasFatalFailure());
    check_sums(1, inputs, answers);
  }
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

// A dispatch that some ranks have completed and others not is done again: what it left in the records must
// not be taken for what stands.
TEST_P(EngineWrapsTest, ADispatchThatWasUndoneAsTagsBeganAnewIsForgotten) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  const auto answers = answer(0, inputs);
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
  run(Op::kCombine, 0, inputs);
  ASSERT_FALSE(HasFatalFailure());
  check_sums(0, inputs, answers);
  run_and_check(0);
}

class EngineRenewalTest : public EngineWrapsTest {
 protected:
  EngineRenewalTest() : EngineWrapsTest(abi::kTagRound - 3) {}
};
INSTANTIATE_TEST_SUITE_P(Kinds, EngineRenewalTest, kinds(), kind_name);

// An epoch that has lasted for so many operations is ended before its tags are at an end.
TEST_P(EngineRenewalTest, AnEpochWhoseNumbersRunOutIsBroken) {
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  const auto answers = answer(0, inputs);
  while (in_tags(next_) < abi::kTagRenewal && !HasFatalFailure()) run(Op::kCombine, 0, inputs);
  ASSERT_FALSE(HasFatalFailure());
  break_for_want_of_numbers();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(next_, abi::kTagRenewal);
  EXPECT_EQ(in_tags(next_), abi::kTagRenewal - abi::kTagRound);
  run(Op::kCombine, 0, inputs);
  ASSERT_FALSE(HasFatalFailure());
  check_sums(0, inputs, answers);
  run_and_check(1);
}

}  // namespace
}  // namespace epd::test
