// epd_group_advance: one step of a program that goes on after breaks, with a scripted engine.
#include "client_fixture.h"

#include <future>
#include <string>

namespace epd::testing {
namespace {

class ClientAdvance : public ClientTest {
 protected:
  ClientAdvance() {
    epd_result_init(&result_);
    epd_resume_info_init(&info_);
    result_.status = EPD_INTERNAL;  // it has not been written
  }
  epd_status_t advance(std::int32_t timeout_ms = 20'000) {
    return epd_group_advance(group_, &ticket_, timeout_ms, &result_, &info_);
  }
  void submit(std::uint32_t slot = 0) { ticket_ = dispatch(slot); }

  epd_ticket_t ticket_ = 0;
  epd_result_t result_;
  epd_resume_info_t info_;
};

TEST_F(ClientAdvance, TellsWhichOperationIsNext) {
  for (std::uint64_t op = 0; op < 3; ++op) {
    submit();
    daemon_.complete(*daemon_.next_call());
    ASSERT_EQ(advance(), EPD_OK) << epd_last_error();
    EXPECT_EQ(ticket_, 0u);
    EXPECT_EQ(result_.status, EPD_OK);
    EXPECT_EQ(result_.op_index, op);
    EXPECT_EQ(info_.resume_op, op + 1);
    EXPECT_EQ(info_.epoch, 1u);
  }
  ASSERT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket_), EPD_OK);
  daemon_.complete(*daemon_.next_call());
  ASSERT_EQ(advance(), EPD_OK) << epd_last_error();
  EXPECT_EQ(info_.resume_op, 3u) << "a noop has no number";
  ASSERT_EQ(advance(EPD_NO_WAIT), EPD_OK) << "no operation, and nothing is wrong: " << epd_last_error();
  EXPECT_EQ(info_.resume_op, 3u);
}

TEST_F(ClientAdvance, TakesAnOperationThatABreakHasUndoneAndResumes) {
  for (const StatusCode cause : {StatusCode::kRankLost, StatusCode::kDeadlineExceeded,
                                 StatusCode::kEngineRestarted, StatusCode::kAborted}) {
    const std::uint64_t epoch = info_.epoch != 0 ? info_.epoch : 1;
    submit();
    daemon_.complete(*daemon_.next_call(), cause, 0, "rank 0");
    ASSERT_EQ(advance(), EPD_OK) << epd_last_error();
    EXPECT_EQ(ticket_, 0u);
    EXPECT_EQ(result_.status, static_cast<epd_status_t>(cause));
    EXPECT_EQ(result_.failed_rank, 0);
    EXPECT_EQ(info_.epoch, epoch + 1);
    EXPECT_EQ(info_.resume_op, 0u) << "the same operation again";
    EXPECT_EQ(epd_is_break(result_.status), 1);
  }
  submit();
  EXPECT_EQ(daemon_.next_call()->epoch, 5u);
}

TEST_F(ClientAdvance, GoesBackToAnOperationThatThisRankHasCompleted) {
  submit();
  daemon_.complete(*daemon_.next_call());
  ASSERT_EQ(advance(), EPD_OK) << epd_last_error();
  submit();
  daemon_.end(*daemon_.next_call(), abi::CallEnding::kFailed);
  daemon_.write_board(abi::GroupState::kActive, 2, 0, StatusCode::kRankLost, "rank 0 died");
  ASSERT_EQ(advance(), EPD_OK) << epd_last_error();
  EXPECT_EQ(info_.resume_op, 0u);
}

TEST_F(ClientAdvance, ABreakBehindTheOperationIsNoticedByTheNextSubmission) {
  submit();
  daemon_.complete(*daemon_.next_call());
  daemon_.write_board(abi::GroupState::kActive, 2, 0, StatusCode::kRankLost, "rank 0 died");
  ASSERT_EQ(advance(), EPD_OK) << epd_last_error();
  EXPECT_EQ(result_.status, EPD_OK);
  EXPECT_EQ(info_.resume_op, 1u);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  const epd_status_t refused = epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket_, nullptr);
  EXPECT_EQ(refused, EPD_RANK_LOST);
  EXPECT_EQ(epd_is_break(refused), 1);
  ASSERT_EQ(advance(), EPD_OK) << epd_last_error();
  EXPECT_EQ(info_.epoch, 2u);
  EXPECT_EQ(info_.resume_op, 0u);
}

TEST_F(ClientAdvance, WaitsThatGiveUpGoOnWithTheSameTicket) {
  submit();
  const epd_ticket_t submitted = ticket_;
  const auto call = daemon_.next_call();
  EXPECT_EQ(advance(EPD_NO_WAIT), EPD_WOULD_BLOCK);
  EXPECT_EQ(advance(20), EPD_DEADLINE_EXCEEDED);
  EXPECT_EQ(ticket_, submitted);
  EXPECT_EQ(result_.status, EPD_INTERNAL) << "there is no end yet";
  daemon_.end(*call, abi::CallEnding::kFailed);
  daemon_.write_board(abi::GroupState::kBroken, 1, 0, StatusCode::kRankLost, "rank 0 died");
  daemon_.member().board().released = 1;
  EXPECT_EQ(advance(20), EPD_DEADLINE_EXCEEDED);
  EXPECT_ERROR_HAS("the group has not agreed on a new epoch within 20 ms");
  EXPECT_EQ(ticket_, 0u) << "the operation has ended";
  EXPECT_EQ(result_.status, EPD_RANK_LOST);
  EXPECT_EQ(advance(EPD_NO_WAIT), EPD_WOULD_BLOCK);
  daemon_.write_board(abi::GroupState::kActive, 2, 0, StatusCode::kRankLost, "rank 0 died");
  ASSERT_EQ(advance(), EPD_OK) << epd_last_error();
  EXPECT_EQ(info_.epoch, 2u);
}

// A wait for it without end gives up 5 s after its deadline.
TEST_F(ClientAdvance, WaitsForAStoppedEngineWithoutEnd) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.timeout_ms = 1;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket_, nullptr), EPD_OK) << epd_last_error();
  const auto call = daemon_.next_call();
  auto advancing = std::async(std::launch::async, [this] { return advance(EPD_FOREVER); });
  pause_ms(5'500);
  daemon_.complete(*call);
  EXPECT_EQ(advancing.get(), EPD_OK);
  EXPECT_EQ(info_.resume_op, 1u);
}

TEST_F(ClientAdvance, TheOperationsOwnErrorIsReturnedAndNothingResumed) {
  submit();
  daemon_.complete(*daemon_.next_call(), StatusCode::kInvalidArgument, 0,
                   "slot is 1 on rank 0 and 0 on rank 1");
  EXPECT_EQ(advance(), EPD_INVALID_ARGUMENT);
  EXPECT_STREQ(epd_last_error(), "slot is 1 on rank 0 and 0 on rank 1");
  EXPECT_EQ(epd_is_break(EPD_INVALID_ARGUMENT), 0);
  EXPECT_EQ(ticket_, 0u);
  epd_ticket_t ticket = 0;
  EXPECT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket), EPD_INVALID_ARGUMENT);
  EXPECT_EQ(advance(), EPD_OK) << "resumed when the caller wants it: " << epd_last_error();
  EXPECT_EQ(info_.epoch, 2u);
}

TEST_F(ClientAdvance, EndsWithTheGroup) {
  submit();
  daemon_.write_board(abi::GroupState::kLost, 1, 0, StatusCode::kRankLost, "rank 1 was evicted");
  EXPECT_EQ(advance(), EPD_RANK_LOST);
  EXPECT_STREQ(epd_last_error(), "rank 1 was evicted");
  EXPECT_EQ(ticket_, 0u);
  EXPECT_EQ(advance(), EPD_RANK_LOST);
}

TEST_F(ClientAdvance, EndsWithTheSessionThoughItsStatusMayBeThatOfABreak) {
  submit();
  daemon_.goodbye(StatusCode::kAborted, "drained by the operator");
  EXPECT_EQ(advance(), EPD_ABORTED);
  EXPECT_STREQ(epd_last_error(), "drained by the operator");
}

TEST_F(ClientAdvance, RefusesWhatIsWrong) {
  ticket_ = 77;
  EXPECT_EQ(advance(), EPD_NOT_FOUND);
  EXPECT_EQ(ticket_, 77u);
  EXPECT_EQ(advance(-7), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("timeout_ms is -7");
  EXPECT_EQ(epd_group_advance(nullptr, &ticket_, EPD_NO_WAIT, nullptr, nullptr), EPD_INVALID_ARGUMENT);
  info_.size = 3;
  EXPECT_EQ(advance(), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("info.size is 3");
  EXPECT_EQ(epd_group_advance(group_, nullptr, EPD_NO_WAIT, nullptr, nullptr), EPD_OK) << epd_last_error();
}

}  // namespace
}  // namespace epd::testing
