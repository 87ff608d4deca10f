// The client library when the daemon, the session, the engine or the group ends or breaks.
#include "client_fixture.h"

#include <future>
#include <string>
#include <vector>

namespace epd::testing {
namespace {

TEST_F(ClientOps, DaemonDeathEndsAllWaits) {
  const epd_ticket_t first = dispatch(0);
  const epd_ticket_t second = dispatch(1);
  auto one = std::async(std::launch::async, [&] { return wait(first, nullptr, EPD_FOREVER); });
  auto two = std::async(std::launch::async, [&] { return wait(second, nullptr, EPD_FOREVER); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.hang_up();
  EXPECT_EQ(one.get(), EPD_DAEMON_LOST);
  EXPECT_EQ(two.get(), EPD_DAEMON_LOST);
  epd_ticket_t ticket = 0;
  EXPECT_EQ(epd_noop(group_, 2, EPD_NO_STREAM, &ticket), EPD_DAEMON_LOST);
  EXPECT_EQ(epd_session_check(session_), EPD_DAEMON_LOST);
  EXPECT_EQ(epd_group_resume(group_, 1000, nullptr), EPD_DAEMON_LOST);
  // Mapped memory stays usable: no SIGBUS, no fault.
  epd_buffers_t buffers;
  epd_buffers_init(&buffers);
  ASSERT_EQ(epd_group_buffers(group_, 0, &buffers), EPD_OK);
  static_cast<volatile char*>(buffers.y)[0] = 1;
}

TEST_F(ClientOps, PollingNoticesTheDaemonsDeath) {
  const epd_ticket_t ticket = dispatch(0);
  daemon_.hang_up();
  epd_status_t status = EPD_WOULD_BLOCK;
  for (int i = 0; i < 10'000 && status == EPD_WOULD_BLOCK; ++i) {
    status = epd_ticket_poll(group_, ticket, nullptr);
    pause_ms(1);
  }
  EXPECT_EQ(status, EPD_DAEMON_LOST);
}

TEST_F(ClientOps, GoodbyeTellsWhy) {
  const epd_ticket_t ticket = dispatch(0);
  auto waiting = std::async(std::launch::async, [&] {
    const epd_status_t status = wait(ticket);
    return std::pair(status, std::string(epd_last_error()));  // the error is the waiting thread's
  });
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.goodbye(StatusCode::kAborted, "drained by the operator");
  const auto [status, text] = waiting.get();
  EXPECT_EQ(status, EPD_ABORTED);
  EXPECT_EQ(text, "drained by the operator");
  EXPECT_EQ(epd_session_check(session_), EPD_ABORTED);
}

TEST_F(ClientOps, GoodbyeWithoutHangUpCountsToo) {
  const epd_ticket_t ticket = dispatch(0);
  daemon_.goodbye(StatusCode::kAborted, "drained", false);
  EXPECT_EQ(wait(ticket), EPD_ABORTED);
}

TEST_F(ClientOps, EndedSessionTellsWhy) {
  const epd_ticket_t ticket = dispatch(0);
  auto waiting = std::async(std::launch::async, [&] { return wait(ticket); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.end_session(StatusCode::kInvalidArgument, "call field op is 9");
  EXPECT_EQ(waiting.get(), EPD_INVALID_ARGUMENT);
  epd_ticket_t other = 0;
  EXPECT_EQ(epd_noop(group_, 1, EPD_NO_STREAM, &other), EPD_INVALID_ARGUMENT);
  EXPECT_STREQ(epd_last_error(), "call field op is 9");
}

TEST_F(ClientOps, BreakAndResume) {
  epd_handle_t kept = 0;
  wait_completed(dispatch(0, 1, &kept));
  const epd_ticket_t lost = dispatch(1);
  const auto call = daemon_.next_call();
  daemon_.write_board(abi::GroupState::kBroken, 1, 0, StatusCode::kEngineRestarted,
                      "the engine of host:0 died");
  epd_ticket_t ticket = 0;
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = 2;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_ENGINE_RESTARTED);
  EXPECT_STREQ(epd_last_error(), "the engine of host:0 died");
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_group_resume(group_, 20, nullptr), EPD_DEADLINE_EXCEEDED);
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  auto resuming =
      std::async(std::launch::async, [&] { return epd_group_resume(group_, EPD_FOREVER, &info); });
  pause_ms(10);
  daemon_.write_board(abi::GroupState::kActive, 2, 1, StatusCode::kEngineRestarted,
                      "the engine of host:0 died");
  daemon_.end(*call, abi::CallEnding::kDiscarded);
  EXPECT_EQ(resuming.get(), EPD_OK) << epd_last_error();
  EXPECT_EQ(info.epoch, 2u);
  EXPECT_EQ(info.resume_op, 1u);
  EXPECT_EQ(wait(lost), EPD_ENGINE_RESTARTED);
  // Handles name records, as before.
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(daemon_.next_call()->epoch, 2u);
  ASSERT_EQ(combine(0, kept, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(daemon_.next_call()->route, 0u);
}

// It looked without a pause, and never at the daemon's socket.
TEST_F(ClientOps, AFailedCallWhoseReasonIsNotToldHearsOfTheDaemonsDeath) {
  const epd_ticket_t ticket = dispatch(0);
  daemon_.end(*daemon_.next_call(), abi::CallEnding::kFailed);
  auto waiting = std::async(std::launch::async, [&] { return wait(ticket); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.hang_up();
  EXPECT_EQ(waiting.get(), EPD_DAEMON_LOST);
}

TEST_F(ClientOps, ALostGroupEndsAllWaits) {
  const epd_ticket_t tickets[] = {dispatch(0), dispatch(1)};
  std::vector<std::future<epd_status_t>> waiting;
  for (const epd_ticket_t ticket : tickets)
    waiting.push_back(std::async(std::launch::async, [this, ticket] { return wait(ticket); }));
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.write_board(abi::GroupState::kLost, 1, 0, StatusCode::kRankLost, "rank 0 (pid 7) died");
  for (auto& one : waiting) EXPECT_EQ(one.get(), EPD_RANK_LOST);
}

// A failure may be known before its reason.
TEST_F(ClientOps, ACheckTellsWhyACallHasFailed) {
  dispatch(0);
  epd_progress_t progress;
  epd_progress_init(&progress);
  ASSERT_EQ(epd_group_check(group_, &progress), EPD_OK) << epd_last_error();
  EXPECT_EQ(progress.ended, 0u);
  daemon_.end(*daemon_.next_call(), abi::CallEnding::kFailed);
  auto checking = std::async(std::launch::async, [&] { return epd_group_check(group_, &progress); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.write_board(abi::GroupState::kBroken, 1, 0, StatusCode::kRankLost, "rank 0 died");
  EXPECT_EQ(checking.get(), EPD_RANK_LOST);
  EXPECT_EQ(progress.ended, 1u);
  EXPECT_EQ(progress.failed, 1u);
}

// A loop that resumes after each error spun while its engine was stopped: the group seemed well, and the slot
// stayed busy.
TEST_F(ClientOps, ResumeWaitsForAStoppedEngine) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.timeout_ms = 1;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  const auto call = daemon_.next_call();
  pause_ms(2);
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_group_resume(group_, 20, nullptr), EPD_DEADLINE_EXCEEDED);
  EXPECT_ERROR_HAS(
      "this device's engine, which may be stopped, has not ended an operation past its deadline");
  auto resuming =
      std::async(std::launch::async, [&] { return epd_group_resume(group_, EPD_FOREVER, nullptr); });
  daemon_.complete(*call);
  EXPECT_EQ(resuming.get(), EPD_OK);
  EXPECT_EQ(wait(ticket), EPD_OK);
}

// A ticket that nobody wants does not end its operation.
TEST_F(ClientOps, ResumeWaitsForAStoppedEngineThoughTheTicketWasDropped) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.timeout_ms = 1;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_drop(group_, ticket), EPD_OK) << epd_last_error();
  pause_ms(2);
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_WOULD_BLOCK);
  daemon_.complete(*daemon_.next_call());
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK);
}

// Calls of the old epoch that are discarded after the new one has begun count as failed in the old one.
TEST_F(ClientOps, ResumeWaitsUntilTheCallsOfTheOldEpochAreDiscarded) {
  dispatch(0);
  const auto call = daemon_.next_call();
  daemon_.write_board(abi::GroupState::kActive, 2, 0, StatusCode::kEngineRestarted, "");
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_group_resume(group_, 20, nullptr), EPD_DEADLINE_EXCEEDED);
  auto resuming =
      std::async(std::launch::async, [&] { return epd_group_resume(group_, EPD_FOREVER, nullptr); });
  daemon_.end(*call, abi::CallEnding::kDiscarded);
  EXPECT_EQ(resuming.get(), EPD_OK);
  EXPECT_EQ(epd_group_check(group_, nullptr), EPD_OK) << epd_last_error();
}

// The board tells of a failure later than the results, perhaps much later.
TEST_F(ClientOps, AGroupWhoseCallHasFailedIsNotResumedInTheSameEpoch) {
  dispatch(0);
  const epd_ticket_t behind = dispatch(1);
  daemon_.end(*daemon_.next_call(), abi::CallEnding::kFailed);
  daemon_.end(*daemon_.next_call(), abi::CallEnding::kDiscarded);
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_group_resume(group_, 20, nullptr), EPD_DEADLINE_EXCEEDED);
  daemon_.write_board(abi::GroupState::kActive, 2, 0, StatusCode::kRankLost, "rank 0 died");
  EXPECT_EQ(wait(behind), EPD_RANK_LOST);
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_group_check(group_, nullptr), EPD_OK) << epd_last_error();
}

TEST_F(ClientOps, StaleEpochMustResumeEvenIfTheGroupIsActiveAgain) {
  daemon_.write_board(abi::GroupState::kActive, 7, 4, StatusCode::kDeadlineExceeded, "");
  epd_ticket_t ticket = 0;
  EXPECT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket), EPD_DEADLINE_EXCEEDED);
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  ASSERT_EQ(epd_group_resume(group_, EPD_NO_WAIT, &info), EPD_OK);
  EXPECT_EQ(info.resume_op, 4u);
  ASSERT_EQ(epd_group_resume(group_, EPD_NO_WAIT, &info), EPD_OK) << "nothing is wrong now";
  EXPECT_EQ(info.epoch, 7u);
  EXPECT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket), EPD_OK) << epd_last_error();
}

TEST_F(ClientOps, HalfWrittenBoardIsNotBelieved) {
  abi::Board& board = daemon_.member().board();
  board.change.store(1);
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_group_resume(group_, 30, nullptr), EPD_DEADLINE_EXCEEDED);
  board.change.store(2);
  EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK);
}

TEST_F(ClientOps, LostGroupStaysLost) {
  daemon_.write_board(abi::GroupState::kLost, 1, 0, StatusCode::kRankLost, "rank 0 (pid 7) died");
  epd_ticket_t ticket = 0;
  EXPECT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket), EPD_RANK_LOST);
  EXPECT_EQ(epd_group_resume(group_, EPD_FOREVER, nullptr), EPD_RANK_LOST);
  EXPECT_STREQ(epd_last_error(), "rank 0 (pid 7) died");
}

}  // namespace
}  // namespace epd::testing
