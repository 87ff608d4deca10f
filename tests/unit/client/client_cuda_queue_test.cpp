// The client library on a CUDA device: several operations of one stream in flight, and how they end.
#include "client_cuda_fixture.h"

#include <atomic>
#include <future>
#include <thread>

namespace epd::testing {
namespace {

// dispatch, combine, dispatch, combine on one slot, and nothing has completed yet.
TEST_P(ClientCuda, OperationsOfOneStreamNeedNoLookBetweenThem) {
  constexpr std::size_t kRounds = 3;
  std::vector<epd_ticket_t> tickets(2 * kRounds);
  std::vector<epd_handle_t> handles(kRounds);
  for (std::size_t i = 0; i < kRounds; ++i) {
    ASSERT_EQ(dispatch(1, stream_, &tickets[2 * i], false, &handles[i]), EPD_OK) << epd_last_error();
    ASSERT_EQ(combine(1, stream_, handles[i], &tickets[2 * i + 1]), EPD_OK) << epd_last_error();
  }
  const auto submitted = submissions();
  ASSERT_EQ(submitted.size(), tickets.size());
  const auto ops = cuda_.enqueued(stream_);
  ASSERT_EQ(ops.size(), 2 * tickets.size());
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    EXPECT_EQ(submitted[i].ticket, tickets[i]);
    EXPECT_EQ(submitted[i].route, 1u);
    EXPECT_EQ(submitted[i].handle, i % 2 == 0 ? 0 : i - 1) << "the number of its dispatch";
    expect(ops[2 * i], StreamOp::kWrite, ready(1), tickets[i]);
    expect(ops[2 * i + 1], StreamOp::kWait, done(1), tickets[i]);
  }
  // The first handle is stale as soon as the second dispatch is submitted.
  epd_ticket_t refused = 0;
  EXPECT_EQ(combine(1, stream_, handles[0], &refused), EPD_NOT_FOUND);
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    EXPECT_EQ(at(ready(1)), tickets[i]) << "not before its turn";
    end(submitted[i]);
  }
  EXPECT_EQ(waits_in(stream_), 0u);
  for (const epd_ticket_t ticket : tickets) EXPECT_EQ(wait(ticket), EPD_OK);
  // All are gone: any stream may use the slot.
  EXPECT_EQ(dispatch(1, other_, &refused), EPD_OK) << epd_last_error();
}

TEST_P(ClientCuda, OnlyTheSameStreamOrdersASlot) {
  epd_ticket_t first = 0;
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  ASSERT_EQ(dispatch(0, stream_, &first, false, &handle), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, handle, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(dispatch(0, other_, &ticket), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("slot 0 has ticket " + std::to_string(first) + " in flight, in another stream");
  EXPECT_EQ(combine(0, nullptr, handle, &ticket), EPD_WOULD_BLOCK);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket), EPD_WOULD_BLOCK);
  EXPECT_EQ(noop(0, other_, &ticket), EPD_WOULD_BLOCK);
  EXPECT_EQ(noop(0, stream_, &ticket), EPD_OK) << epd_last_error();
  // Nor after one without a stream.
  args.slot = 1;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK);
  EXPECT_EQ(dispatch(1, nullptr, &ticket), EPD_WOULD_BLOCK);
  // The default stream is one stream, unless it is each thread's own.
  ASSERT_EQ(dispatch(2, nullptr, &ticket), EPD_OK);
  EXPECT_EQ(dispatch(2, nullptr, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(dispatch(2, CU_STREAM_LEGACY, &ticket), EPD_OK) << "its other name: " << epd_last_error();
  EXPECT_EQ(dispatch(2, nullptr, &ticket), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(3, CU_STREAM_PER_THREAD, &ticket), EPD_OK);
  EXPECT_EQ(dispatch(3, CU_STREAM_PER_THREAD, &ticket), EPD_WOULD_BLOCK);
}

TEST_P(ClientCuda, OnlyTheSameStreamOrdersARouting) {
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket, false, &handle), EPD_OK) << epd_last_error();
  EXPECT_EQ(combine(1, other_, handle, &ticket), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("is in flight on another slot");
  ASSERT_EQ(combine(1, stream_, handle, &ticket), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(0, stream_, &ticket, false, &handle), EPD_OK) << "a reader is in flight";
  const auto all = submissions();
  ASSERT_EQ(all.size(), 3u);
  for (const auto& submission : all) end(submission);
  // A reader in another stream, while one in this stream stands in nobody's way.
  ASSERT_EQ(combine(1, stream_, handle, &ticket), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(2, other_, handle, &ticket), EPD_OK) << "readers do not mind each other";
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("uses the routing of slot 0");
  const auto readers = submissions();
  ASSERT_EQ(readers.size(), 2u);
  end(readers[1]);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
}

TEST_P(ClientCuda, TheyMayEndInAnyOrder) {
  epd_ticket_t tickets[3];
  epd_handle_t handle = 0;
  ASSERT_EQ(dispatch(0, stream_, &tickets[0], false, &handle), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, handle, &tickets[1]), EPD_OK) << epd_last_error();
  ASSERT_EQ(noop(0, stream_, &tickets[2]), EPD_OK) << epd_last_error();
  const auto all = submissions();
  ASSERT_EQ(all.size(), 3u);
  epd_ticket_t refused = 0;
  for (const int i : {2, 0, 1}) {
    EXPECT_EQ(dispatch(0, other_, &refused), EPD_WOULD_BLOCK);
    daemon_.complete(all[i]);
    EXPECT_EQ(wait(tickets[i]), EPD_OK);
  }
  cuda_.poke(done(0), static_cast<std::uint32_t>(tickets[2]));
  EXPECT_EQ(waits_in(stream_), 0u);
  EXPECT_EQ(dispatch(0, other_, &refused), EPD_OK) << epd_last_error();
}

TEST_P(ClientCuda, TheRingIsFullAtLast) {
  std::vector<epd_ticket_t> tickets(abi::kCompletionSlots - 4);
  for (epd_ticket_t& ticket : tickets) ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  const std::size_t before = cuda_.enqueued_anywhere();
  epd_ticket_t refused = 0;
  EXPECT_EQ(dispatch(0, stream_, &refused), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("ring is full");
  EXPECT_EQ(cuda_.enqueued_anywhere(), before);
  // Also if the engine has taken them, or has ended them where nobody sees it: the others would not fit.
  std::vector<abi::Submission> taken = submissions();
  EXPECT_EQ(dispatch(0, stream_, &refused), EPD_WOULD_BLOCK);
  // Twice as many and more, though nobody looks at a ticket: submissions make room for completions.
  for (std::size_t i = 0; i < 150; ++i) {
    end(taken[i]);
    tickets.emplace_back();
    ASSERT_EQ(dispatch(0, stream_, &tickets.back()), EPD_OK) << i << ": " << epd_last_error();
    for (const auto& submission : submissions()) taken.push_back(submission);
  }
  for (std::size_t i = 150; i < taken.size(); ++i) end(taken[i]);
  EXPECT_EQ(waits_in(stream_), 0u);
  for (const epd_ticket_t ticket : tickets) EXPECT_EQ(wait(ticket), EPD_OK);
}

TEST_P(ClientCuda, ABreakTakesAllOfThem) {
  epd_ticket_t tickets[4];
  epd_handle_t handles[2];
  for (std::size_t i = 0; i < 2; ++i) {
    ASSERT_EQ(dispatch(0, stream_, &tickets[2 * i], false, &handles[i]), EPD_OK) << epd_last_error();
    ASSERT_EQ(combine(0, stream_, handles[i], &tickets[2 * i + 1]), EPD_OK) << epd_last_error();
  }
  const auto all = submissions();
  ASSERT_EQ(all.size(), 4u);
  end(all[0]);  // operation 0; the others are to be done again
  EXPECT_EQ(wait(tickets[0]), EPD_OK);
  daemon_.write_board(abi::GroupState::kActive, 2, 1, StatusCode::kEngineRestarted, "it fell");
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  ASSERT_EQ(epd_group_resume(group_, 20'000, &info), EPD_OK) << epd_last_error();
  EXPECT_EQ(info.resume_op, 1u);
  for (const int i : {3, 1, 2}) daemon_.complete(all[i], StatusCode::kEngineRestarted);
  for (const int i : {1, 2, 3}) EXPECT_EQ(wait(tickets[i]), EPD_ENGINE_RESTARTED) << i;
  EXPECT_TRUE(cuda_.await_idle(stream_));
  EXPECT_EQ(combine(0, stream_, handles[1], &tickets[1]), EPD_NOT_FOUND);
  // Whether the first routing still stands, the engine knows.
  ASSERT_EQ(combine(0, stream_, handles[0], &tickets[1]), EPD_OK) << epd_last_error();
  epd_handle_t again = 0;
  ASSERT_EQ(dispatch(0, stream_, &tickets[2], false, &again), EPD_OK) << epd_last_error();
  EXPECT_EQ(again, handles[1]) << "the same operation on the same route";
  ASSERT_EQ(combine(0, stream_, again, &tickets[3]), EPD_OK) << epd_last_error();
  EXPECT_EQ(combine(0, stream_, handles[0], &tickets[0]), EPD_NOT_FOUND);
}

// Redone in the stream before this client hears that the old operations failed.
TEST_P(ClientCuda, ALateFailureDoesNotTakeTheRedosRoute) {
  epd_ticket_t late[2];
  epd_ticket_t ticket = 0;
  epd_handle_t old_handle = 0;
  epd_handle_t handle = 0;
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.keep_handle = 1;
  ASSERT_EQ(epd_dispatch(group_, &args, stream_, &late[0], &old_handle), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, old_handle, &late[1]), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_handle_release(group_, old_handle), EPD_WOULD_BLOCK);
  const auto old = submissions();
  daemon_.write_board(abi::GroupState::kActive, 2, 0, StatusCode::kEngineRestarted, "it fell");
  ASSERT_EQ(epd_group_resume(group_, 20'000, nullptr), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_dispatch(group_, &args, stream_, &ticket, &handle), EPD_OK) << epd_last_error();
  EXPECT_EQ(handle, old_handle) << "the same operation on the same route";
  for (const auto& submission : old) daemon_.complete(submission, StatusCode::kEngineRestarted);
  for (const epd_ticket_t failed : late) EXPECT_EQ(wait(failed), EPD_ENGINE_RESTARTED);
  ASSERT_EQ(combine(0, stream_, handle, &late[1]), EPD_OK) << "it is still the redo's: " << epd_last_error();
  for (const auto& submission : submissions()) end(submission);
  EXPECT_EQ(waits_in(stream_), 0u);
  EXPECT_EQ(wait(ticket), EPD_OK);
  EXPECT_EQ(wait(late[1]), EPD_OK);
  EXPECT_EQ(epd_handle_release(group_, handle), EPD_OK) << epd_last_error();
}

TEST_P(ClientCuda, AKeptHandleWhoseDispatchFailedIsGivenBackOnce) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.keep_handle = 1;
  epd_ticket_t tickets[3];
  epd_handle_t failed = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, stream_, &tickets[0], &failed), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, failed, &tickets[1]), EPD_OK) << epd_last_error();
  for (const auto& submission : submissions()) end(submission, StatusCode::kResourceExhausted);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(wait(tickets[i]), EPD_RESOURCE_EXHAUSTED);
  EXPECT_EQ(combine(0, stream_, failed, &tickets[2]), EPD_NOT_FOUND);
  EXPECT_EQ(epd_handle_release(group_, failed), EPD_NOT_FOUND);
  epd_handle_t kept[3];
  ASSERT_EQ(epd_dispatch(group_, &args, stream_, &tickets[0], &kept[0]), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_dispatch(group_, &args, stream_, &tickets[1], &kept[1]), EPD_OK) << epd_last_error();
  EXPECT_NE(kept[0] >> 40, kept[1] >> 40) << "a record was given out twice";
  EXPECT_EQ(epd_dispatch(group_, &args, stream_, &tickets[2], &kept[2]), EPD_RESOURCE_EXHAUSTED);
}

// The engine could not write `done`: its GPU has failed, or it has no lane any more.
TEST_P(ClientCuda, AFailureThatIsSeenReleasesTheStream) {
  epd_ticket_t tickets[3];
  epd_handle_t handle = 0;
  ASSERT_EQ(dispatch(0, stream_, &tickets[0], false, &handle), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, handle, &tickets[1]), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(3, other_, &tickets[2]), EPD_OK) << epd_last_error();
  const auto all = submissions();
  ASSERT_EQ(all.size(), 3u);
  daemon_.complete(all[1], StatusCode::kRankLost, 1, "rank 1 died");
  EXPECT_EQ(wait(tickets[1]), EPD_RANK_LOST);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(at(done(0)), 0u) << "the engine may still write for the first";
  EXPECT_GT(waits_in(stream_), 0u);
  daemon_.complete(all[0], StatusCode::kRankLost, 1, "rank 1 died");
  EXPECT_EQ(wait(tickets[0]), EPD_RANK_LOST);
  EXPECT_TRUE(cuda_.await_idle(stream_));
  EXPECT_EQ(at(done(0)), tickets[1]);
  EXPECT_EQ(waits_in(other_), 1u);
  EXPECT_EQ(at(done(3)), 0u);
  daemon_.complete(all[2], StatusCode::kRankLost, 1, "rank 1 died");
  EXPECT_EQ(wait(tickets[2]), EPD_RANK_LOST);
  EXPECT_TRUE(cuda_.await_idle(other_));
}

// Else the word would fall back behind what the engine writes for that one.
TEST_P(ClientCuda, TheSlotsNextOperationIsPublishedAfterTheRelease) {
  epd_ticket_t failed = 0;
  epd_ticket_t next = 0;
  ASSERT_EQ(dispatch(0, stream_, &failed), EPD_OK) << epd_last_error();
  std::atomic<bool> writing{false};
  std::atomic<bool> go_on{false};
  cuda_.on_enqueue([&](CUstream stream, const StreamOp& op) {
    if (stream == stream_) return;
    EXPECT_EQ(op.address, done(0));
    writing = true;
    while (!go_on) std::this_thread::yield();
  });
  daemon_.complete(*daemon_.next_submission(), StatusCode::kInvalidArgument);
  EXPECT_EQ(wait(failed), EPD_INVALID_ARGUMENT);
  while (!writing) std::this_thread::yield();
  auto submitted = std::async(std::launch::async, [&] { return dispatch(0, stream_, &next); });
  EXPECT_FALSE(daemon_.next_submission(50).has_value());
  go_on = true;
  EXPECT_EQ(submitted.get(), EPD_OK) << epd_last_error();
  cuda_.on_enqueue(nullptr);
  EXPECT_EQ(at(done(0)), failed);
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  end(*submission);
  EXPECT_EQ(waits_in(stream_), 0u);
  EXPECT_EQ(wait(next), EPD_OK);
}

TEST_P(ClientCuda, WordsAreNotRenewedUnderAnOperationInFlight) {
  epd_ticket_t first = 0;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &first), EPD_OK) << epd_last_error();
  start_after(session_, std::uint64_t{1} << 31);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("tickets ago");
  EXPECT_EQ(cuda_.enqueued_anywhere(), 2u);
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  end(*submission);
  EXPECT_EQ(wait(first), EPD_OK);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
}

}  // namespace
}  // namespace epd::testing
