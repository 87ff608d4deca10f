// What a former engine left behind waits for its group until the new engine has been told of all, and not
// longer.
#include "engine_fixture.h"
#include "session_port.h"

namespace epd::test {
namespace {

constexpr std::uint32_t kEnded = 999;  // a membership whose group has ended

class EngineAllToldTest : public EngineFixture {
 protected:
  void SetUp() override {
    EngineFixture::SetUp();
    page_ = Mapping::map(engines_[1]->page().get(), sizeof(abi::EnginePage), Access::kReadOnly).value();
    EXPECT_EQ(engines_[1]->stop(), 0);
  }
  // Its session and its group, which goes on.
  void start_again() {
    engines_[1]->start();
    session(1).add_to(*engine_view_[1]);
    break_without_engine_1();
    group_->add_to_engine(engine_view_, session_view_, 1, true);
    resume_all();
  }
  std::uint64_t submit_noop(std::uint32_t member) {
    abi::Submission s = submission(1, Op::kNoop, 0);
    s.member = member;
    return session(1).submit(s);
  }
  void expect_answer(std::uint64_t ticket, StatusCode status) {
    const auto done = session(1).wait();
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->ticket, ticket);
    EXPECT_EQ(done->status, status);
  }
  std::uint64_t group_stalls() const {
    for (const abi::StatisticsRow& row : page_.as<abi::EnginePage>()->sessions.rows) {
      if (row.key != 0 && row.session_id == session_view_[1]->id())
        return row.stalls[static_cast<std::size_t>(abi::Stall::kGroup)];
    }
    return 0;
  }

  Mapping page_;
};

TEST_F(EngineAllToldTest, ASubmissionWaitsForItsGroupUntilAllAreTold) {
  start_again();
  ASSERT_FALSE(HasFatalFailure());
  const std::uint64_t ended = submit_noop(kEnded);
  const std::uint64_t behind = submit_noop(RawGroup::member(1));
  ASSERT_TRUE(comes([&] { return group_stalls() == 1; }));
  EXPECT_FALSE(session(1).wait(50).has_value());
  engine_view_[1]->send(LinkType::kAllTold, abi::AllTold{});
  expect_answer(ended, StatusCode::kEngineRestarted);
  expect_answer(behind, StatusCode::kOk);
  const std::uint64_t later = submit_noop(kEnded);
  expect_answer(later, StatusCode::kEngineRestarted);
  EXPECT_EQ(group_stalls(), 1u);
}

TEST_F(EngineAllToldTest, WhatWasInFlightForAGroupThatHasEndedIsAnsweredWhenAllAreTold) {
  session(1).b().inflight[0] = {70, 2, 0, kEnded, 0, 0, 0};
  session(1).b().inflight[1] = {71, engine::kUnnumbered, 0, RawGroup::member(1), 0, 0, 0};
  engines_[1]->start();
  session(1).add_to(*engine_view_[1]);
  break_without_engine_1();
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  EXPECT_FALSE(session(1).wait(50).has_value());
  engine_view_[1]->send(LinkType::kAllTold, abi::AllTold{});
  expect_answer(70, StatusCode::kEngineRestarted);
  EXPECT_FALSE(session(1).wait(50).has_value()) << "its group is still broken";
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  expect_answer(71, StatusCode::kEngineRestarted);
}

TEST_F(EngineAllToldTest, ASessionThatComesLaterWaitsForNothing) {
  session(1).b().inflight[0] = {70, 2, 0, kEnded, 0, 0, 0};
  engines_[1]->start();
  engine_view_[1]->send(LinkType::kAllTold, abi::AllTold{});
  session(1).add_to(*engine_view_[1]);
  expect_answer(70, StatusCode::kEngineRestarted);
  const std::uint64_t ended = submit_noop(kEnded);
  expect_answer(ended, StatusCode::kEngineRestarted);
  EXPECT_EQ(group_stalls(), 0u);
}

}  // namespace
}  // namespace epd::test
