// The client library on a CUDA device: a recorded driver below, the scripted daemon beside it.
#include "client_fixture.h"
#include "epd/epd.hpp"
#include "recorded_cuda.h"
#include "session.h"

#include <atomic>
#include <cstdlib>
#include <functional>
#include <future>
#include <thread>

namespace epd::client {
// What only a test may do: tickets near the end of 32 bits.
struct SessionTestAccess {
  static void set_last_ticket(epd_session_t* session, std::uint64_t ticket) {
    reinterpret_cast<Session*>(session)->last_ticket_ = ticket;
  }
};
}  // namespace epd::client

namespace epd::testing {
namespace {

constexpr std::uint8_t kUuid = 0x5a;

FakeSettings cuda_settings() {
  FakeSettings settings;
  settings.automatic = false;
  settings.device_kind = abi::DeviceKind::kCuda;
  settings.device_uuid = kUuid;
  return settings;
}

class ClientCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    daemon_.set(cuda_settings());
    ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
    epd_group_config_t config = small_config();
    config.num_handles = 2;
    ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
    epd_buffers_t buffers = EPD_BUFFERS_INIT;
    ASSERT_EQ(epd_group_buffers(group_, 0, &buffers), EPD_OK);
    base_ = reinterpret_cast<std::uintptr_t>(buffers.x);
  }
  void TearDown() override {
    detach();
    EXPECT_EQ(cuda_.current(), nullptr);
    EXPECT_EQ(cuda_.mapped_bytes(), 0u);
    EXPECT_EQ(cuda_.retained(), 0);
    for (const std::string& mistake : cuda_.mistakes()) ADD_FAILURE() << mistake;
  }
  void detach() {
    epd_session_detach(session_);
    session_ = nullptr;
    group_ = nullptr;
  }

  abi::UserArenaLayout arena() { return abi::UserArenaLayout(daemon_.member().shape); }
  std::uintptr_t ready(std::uint32_t slot) { return base_ + arena().ready_word(slot); }
  std::uintptr_t done(std::uint32_t slot) { return base_ + arena().done_word(slot); }
  std::uint32_t at(std::uintptr_t address) {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address)).load();
  }
  // What the engine does at an operation's end.
  void end(const abi::Submission& submission, StatusCode status = StatusCode::kOk) {
    cuda_.poke(done(submission.slot), static_cast<std::uint32_t>(submission.ticket));
    daemon_.complete(submission, status);
  }
  epd_status_t dispatch(std::uint32_t slot, CUstream stream, epd_ticket_t* ticket, bool deferred = false,
                        epd_handle_t* handle = nullptr) {
    epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
    args.slot = slot;
    args.num_tokens = 3;
    args.on_stream = 1;
    args.stream = stream;
    args.defer_receive = deferred ? 1 : 0;
    return epd_dispatch(group_, &args, ticket, handle);
  }
  epd_status_t combine(std::uint32_t slot, CUstream stream, epd_handle_t handle, epd_ticket_t* ticket) {
    epd_combine_args_t args = EPD_COMBINE_ARGS_INIT;
    args.slot = slot;
    args.handle = handle;
    args.on_stream = 1;
    args.stream = stream;
    return epd_combine(group_, &args, ticket);
  }
  epd_status_t wait(epd_ticket_t ticket) { return epd_ticket_wait(group_, ticket, 20'000, nullptr); }
  // All that has been submitted and not been taken yet.
  std::vector<abi::Submission> submissions() {
    std::vector<abi::Submission> all;
    while (const auto submission = daemon_.next_submission(0)) all.push_back(*submission);
    return all;
  }
  static void expect(const StreamOp& op, StreamOp::Kind kind, std::uintptr_t address, std::uint64_t value) {
    EXPECT_EQ(op.kind, kind);
    EXPECT_EQ(op.address, address);
    EXPECT_EQ(op.value, static_cast<std::uint32_t>(value));
  }

  const CUstream stream_ = reinterpret_cast<CUstream>(0x1000);
  const CUstream other_ = reinterpret_cast<CUstream>(0x2000);
  RecordedCuda cuda_{{0x11, kUuid}};
  FakeDaemon daemon_;
  epd_session_t* session_ = nullptr;
  epd_group_t* group_ = nullptr;
  std::uintptr_t base_ = 0;
};

TEST_F(ClientCuda, MapsTheArenaOfTheDeviceWithThatUuid) {
  epd_session_info_t info = EPD_SESSION_INFO_INIT;
  ASSERT_EQ(epd_session_info(session_, &info), EPD_OK);
  EXPECT_EQ(info.device_kind, EPD_DEVICE_CUDA);
  EXPECT_EQ(cuda_.retained(), 1);
  const std::size_t granularity = std::size_t{2} << 20;
  EXPECT_EQ(cuda_.mapped_bytes(), abi::align_up(arena().total_bytes, granularity));
  // The same memory as the daemon's, at the layout's places.
  epd_buffers_t buffers = EPD_BUFFERS_INIT;
  ASSERT_EQ(epd_group_buffers(group_, 1, &buffers), EPD_OK);
  *static_cast<std::uint16_t*>(buffers.x) = 0x1234;
  EXPECT_EQ(*daemon_.member().user.as<std::uint16_t>(arena().at(1, abi::Region::kX)), 0x1234);
  epd_group_leave(group_);
  EXPECT_EQ(cuda_.mapped_bytes(), 0u);
  EXPECT_EQ(cuda_.synchronized(), 1);
}

TEST_F(ClientCuda, WithoutAStreamNothingIsEnqueued) {
  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, &ticket, nullptr), EPD_OK) << epd_last_error();
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(submission->flags & abi::kFlagStream, 0u);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket, stream_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("on_stream");
  daemon_.complete(*submission);
  EXPECT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);
  EXPECT_EQ(cuda_.enqueued_anywhere(), 0u);
  args.stream = stream_;
  EXPECT_EQ(epd_dispatch(group_, &args, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("on_stream is 0");
}

TEST_F(ClientCuda, WritesReadyThenPublishesThenWaits) {
  std::optional<abi::Submission> submission;
  cuda_.on_enqueue([&](CUstream, const StreamOp& op) {
    auto found = daemon_.next_submission(0);
    EXPECT_EQ(found.has_value(), op.kind == StreamOp::kWait);
    if (found) submission = found;
  });
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  ASSERT_EQ(dispatch(2, stream_, &ticket, false, &handle), EPD_OK) << epd_last_error();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(submission->ticket, ticket);
  EXPECT_EQ(submission->flags, abi::kFlagStream | abi::kFlagWeights);
  const auto ops = cuda_.enqueued(stream_);
  ASSERT_EQ(ops.size(), 2u);
  expect(ops[0], StreamOp::kWrite, ready(2), ticket);
  expect(ops[1], StreamOp::kWait, done(2), ticket);
  EXPECT_EQ(at(ready(2)), ticket);
  EXPECT_EQ(cuda_.stuck(stream_), 1u);
  cuda_.on_enqueue(nullptr);
  end(*submission);
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  EXPECT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);

  epd_combine_args_t args = EPD_COMBINE_ARGS_INIT;
  args.slot = 2;
  args.handle = handle;
  args.on_stream = 1;  // the default stream
  ASSERT_EQ(epd_combine(group_, &args, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.enqueued(nullptr).size(), 2u);
  submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(submission->flags, std::uint32_t{abi::kFlagStream});
  end(*submission);
  ASSERT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);

  ASSERT_EQ(epd_noop_on_stream(group_, 2, stream_, &ticket), EPD_OK) << epd_last_error();
  submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(submission->flags, std::uint32_t{abi::kFlagStream});
  EXPECT_EQ(cuda_.stuck(stream_), 1u);
  end(*submission, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  EXPECT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_DEADLINE_EXCEEDED);
}

TEST_F(ClientCuda, ARefusedSubmissionEnqueuesNothing) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  const std::size_t before = cuda_.enqueued_anywhere();
  epd_ticket_t refused = 0;
  EXPECT_EQ(dispatch(0, other_, &refused), EPD_WOULD_BLOCK);  // the slot is busy
  EXPECT_EQ(dispatch(99, stream_, &refused), EPD_INVALID_ARGUMENT);
  epd_combine_args_t args = EPD_COMBINE_ARGS_INIT;
  args.slot = 1;
  args.handle = 12345;
  args.on_stream = 1;
  EXPECT_EQ(epd_combine(group_, &args, &refused), EPD_NOT_FOUND);
  args.on_stream = 2;
  EXPECT_EQ(epd_combine(group_, &args, &refused), EPD_INVALID_ARGUMENT);
  daemon_.set_submission_head(1 - abi::kSubmissionSlots);  // the ring is full
  EXPECT_EQ(dispatch(1, stream_, &refused), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("ring is full");
  daemon_.set_submission_head(0);
  daemon_.write_board(abi::GroupState::kBroken, 1, 0, StatusCode::kEngineRestarted, "it fell");
  EXPECT_EQ(dispatch(1, stream_, &refused), EPD_ENGINE_RESTARTED);
  EXPECT_EQ(refused, 0u);
  EXPECT_EQ(cuda_.enqueued_anywhere(), before);
}

TEST_F(ClientCuda, ASessionThatEndsAfterTheWritePublishesNothing) {
  cuda_.on_enqueue([&](CUstream stream, const StreamOp&) {
    if (stream == stream_) daemon_.end_session(StatusCode::kPermissionDenied, "the operator said so");
  });
  epd_ticket_t ticket = 0;
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_PERMISSION_DENIED);
  EXPECT_EQ(ticket, 0u);
  EXPECT_FALSE(daemon_.next_submission(0).has_value());
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
}

// Its ready word has been written: no later operation may take that for its own.
TEST_F(ClientCuda, ATicketThatWasWrittenButNotSubmittedIsUsedUp) {
  epd_ticket_t ticket = 0;
  cuda_.on_enqueue([&](CUstream, const StreamOp&) {
    daemon_.write_board(abi::GroupState::kBroken, 1, 0, StatusCode::kEngineRestarted, "it fell");
  });
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_ENGINE_RESTARTED);
  cuda_.on_enqueue(nullptr);
  const std::uint32_t written = at(ready(0));
  EXPECT_NE(written, 0u);
  daemon_.write_board(abi::GroupState::kActive, 2, 0, StatusCode::kOk, "");
  ASSERT_EQ(epd_group_resume(group_, 20'000, nullptr), EPD_OK) << epd_last_error();
  cuda_.hold(stream_, true);
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  EXPECT_GT(ticket, written);
  EXPECT_EQ(at(ready(0)), written);
  cuda_.hold(stream_, false);
  EXPECT_EQ(at(ready(0)), ticket);
}

TEST_F(ClientCuda, DriverErrors) {
  epd_ticket_t ticket = 0;
  cuda_.fail("cuStreamWriteValue32", CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_INTERNAL);
  EXPECT_ERROR_HAS("cuStreamWriteValue32: CUDA_ERROR_INVALID_VALUE");
  EXPECT_EQ(ticket, 0u);
  EXPECT_FALSE(daemon_.next_submission(0).has_value());
  cuda_.fail("cuStreamWriteValue32", CUDA_SUCCESS);
  cuda_.fail("cuStreamWaitValue32", CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_INTERNAL);
  EXPECT_ERROR_HAS("CUDA_ERROR_LAUNCH_FAILED");
  EXPECT_ERROR_HAS("was submitted");
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(ticket, submission->ticket);
  end(*submission);
  EXPECT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);
}

TEST_F(ClientCuda, DeferReceiveLeavesTheWaitToItsHook) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket, true), EPD_OK) << epd_last_error();
  ASSERT_EQ(cuda_.enqueued(stream_).size(), 1u);
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, stream_), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
  ASSERT_EQ(cuda_.enqueued(stream_).size(), 2u);
  expect(cuda_.enqueued(stream_)[1], StreamOp::kWait, done(0), ticket);
  expect(cuda_.enqueued(other_)[0], StreamOp::kWait, done(0), ticket);
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  daemon_.publish_sent(*submission);
  EXPECT_EQ(epd_ticket_wait_sent(group_, ticket, 20'000), EPD_OK);
  EXPECT_EQ(cuda_.stuck(stream_), 1u);
  end(*submission);
  EXPECT_EQ(cuda_.stuck(stream_) + cuda_.stuck(other_), 0u);
  // Also when it has ended, until the ticket is retired.
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK);
  EXPECT_EQ(cuda_.stuck(other_), 0u);
  ASSERT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_NOT_FOUND);
}

// ---- several in flight ---------------------------------------------------------------------------

// dispatch, combine, dispatch, combine on one slot, and nothing has completed yet.
TEST_F(ClientCuda, OperationsOfOneStreamNeedNoLookBetweenThem) {
  constexpr int kRounds = 3;
  std::vector<epd_ticket_t> tickets(2 * kRounds);
  std::vector<epd_handle_t> handles(kRounds);
  for (int i = 0; i < kRounds; ++i) {
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
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  for (const epd_ticket_t ticket : tickets) EXPECT_EQ(wait(ticket), EPD_OK);
  // All are gone: any stream may use the slot.
  EXPECT_EQ(dispatch(1, other_, &refused), EPD_OK) << epd_last_error();
}

TEST_F(ClientCuda, OnlyTheSameStreamOrdersASlot) {
  epd_ticket_t first = 0;
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  ASSERT_EQ(dispatch(0, stream_, &first, false, &handle), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, handle, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(dispatch(0, other_, &ticket), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("slot 0 has ticket " + std::to_string(first) + " in flight, in another stream");
  EXPECT_EQ(combine(0, nullptr, handle, &ticket), EPD_WOULD_BLOCK);
  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  EXPECT_EQ(epd_dispatch(group_, &args, &ticket, nullptr), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_noop(group_, 0, &ticket), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_noop_on_stream(group_, 0, other_, &ticket), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_noop_on_stream(group_, 0, stream_, &ticket), EPD_OK) << epd_last_error();
  // Nor after one without a stream.
  args.slot = 1;
  ASSERT_EQ(epd_dispatch(group_, &args, &ticket, nullptr), EPD_OK);
  EXPECT_EQ(dispatch(1, nullptr, &ticket), EPD_WOULD_BLOCK);
  // The default stream is one stream, unless it is each thread's own.
  ASSERT_EQ(dispatch(2, nullptr, &ticket), EPD_OK);
  EXPECT_EQ(dispatch(2, nullptr, &ticket), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(3, CU_STREAM_PER_THREAD, &ticket), EPD_OK);
  EXPECT_EQ(dispatch(3, CU_STREAM_PER_THREAD, &ticket), EPD_WOULD_BLOCK);
}

TEST_F(ClientCuda, OnlyTheSameStreamOrdersARouting) {
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

TEST_F(ClientCuda, TheyMayEndInAnyOrder) {
  epd_ticket_t tickets[3];
  epd_handle_t handle = 0;
  ASSERT_EQ(dispatch(0, stream_, &tickets[0], false, &handle), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, handle, &tickets[1]), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_noop_on_stream(group_, 0, stream_, &tickets[2]), EPD_OK) << epd_last_error();
  const auto all = submissions();
  ASSERT_EQ(all.size(), 3u);
  epd_ticket_t refused = 0;
  for (const int i : {2, 0, 1}) {
    EXPECT_EQ(dispatch(0, other_, &refused), EPD_WOULD_BLOCK);
    daemon_.complete(all[i]);
    EXPECT_EQ(wait(tickets[i]), EPD_OK);
  }
  cuda_.poke(done(0), static_cast<std::uint32_t>(tickets[2]));
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  EXPECT_EQ(dispatch(0, other_, &refused), EPD_OK) << epd_last_error();
}

TEST_F(ClientCuda, TheRingIsFullAtLast) {
  std::vector<epd_ticket_t> tickets(abi::kSubmissionSlots);
  for (epd_ticket_t& ticket : tickets) ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  const std::size_t before = cuda_.enqueued_anywhere();
  epd_ticket_t refused = 0;
  EXPECT_EQ(dispatch(0, stream_, &refused), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("ring is full");
  EXPECT_EQ(cuda_.enqueued_anywhere(), before);
  // Twice as many and more, though nobody looks at a ticket: submissions make room for completions.
  for (int i = 0; i < 150; ++i) {
    const auto submission = daemon_.next_submission(0);
    ASSERT_TRUE(submission.has_value());
    end(*submission);
    tickets.emplace_back();
    ASSERT_EQ(dispatch(0, stream_, &tickets.back()), EPD_OK) << i << ": " << epd_last_error();
  }
  for (const auto& submission : submissions()) end(submission);
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  for (const epd_ticket_t ticket : tickets) EXPECT_EQ(wait(ticket), EPD_OK);
}

TEST_F(ClientCuda, ABreakTakesAllOfThem) {
  epd_ticket_t tickets[4];
  epd_handle_t handles[2];
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(dispatch(0, stream_, &tickets[2 * i], false, &handles[i]), EPD_OK) << epd_last_error();
    ASSERT_EQ(combine(0, stream_, handles[i], &tickets[2 * i + 1]), EPD_OK) << epd_last_error();
  }
  const auto all = submissions();
  ASSERT_EQ(all.size(), 4u);
  end(all[0]);  // operation 0; the others are to be done again
  EXPECT_EQ(wait(tickets[0]), EPD_OK);
  daemon_.write_board(abi::GroupState::kActive, 2, 1, StatusCode::kEngineRestarted, "it fell");
  epd_resume_info_t info = EPD_RESUME_INFO_INIT;
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
TEST_F(ClientCuda, ALateFailureDoesNotTakeTheRedosRoute) {
  epd_ticket_t late[2];
  epd_ticket_t ticket = 0;
  epd_handle_t old_handle = 0;
  epd_handle_t handle = 0;
  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  args.on_stream = 1;
  args.stream = stream_;
  args.keep_handle = 1;
  ASSERT_EQ(epd_dispatch(group_, &args, &late[0], &old_handle), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, old_handle, &late[1]), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_handle_release(group_, old_handle), EPD_WOULD_BLOCK);
  const auto old = submissions();
  daemon_.write_board(abi::GroupState::kActive, 2, 0, StatusCode::kEngineRestarted, "it fell");
  ASSERT_EQ(epd_group_resume(group_, 20'000, nullptr), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_dispatch(group_, &args, &ticket, &handle), EPD_OK) << epd_last_error();
  EXPECT_EQ(handle, old_handle) << "the same operation on the same route";
  for (const auto& submission : old) daemon_.complete(submission, StatusCode::kEngineRestarted);
  for (const epd_ticket_t failed : late) EXPECT_EQ(wait(failed), EPD_ENGINE_RESTARTED);
  ASSERT_EQ(combine(0, stream_, handle, &late[1]), EPD_OK) << "it is still the redo's: " << epd_last_error();
  for (const auto& submission : submissions()) end(submission);
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  EXPECT_EQ(wait(ticket), EPD_OK);
  EXPECT_EQ(wait(late[1]), EPD_OK);
  EXPECT_EQ(epd_handle_release(group_, handle), EPD_OK) << epd_last_error();
}

TEST_F(ClientCuda, AKeptHandleWhoseDispatchFailedIsGivenBackOnce) {
  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  args.on_stream = 1;
  args.stream = stream_;
  args.keep_handle = 1;
  epd_ticket_t tickets[3];
  epd_handle_t failed = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, &tickets[0], &failed), EPD_OK) << epd_last_error();
  ASSERT_EQ(combine(0, stream_, failed, &tickets[1]), EPD_OK) << epd_last_error();
  for (const auto& submission : submissions()) end(submission, StatusCode::kResourceExhausted);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(wait(tickets[i]), EPD_RESOURCE_EXHAUSTED);
  EXPECT_EQ(combine(0, stream_, failed, &tickets[2]), EPD_NOT_FOUND);
  EXPECT_EQ(epd_handle_release(group_, failed), EPD_NOT_FOUND);
  epd_handle_t kept[3];
  ASSERT_EQ(epd_dispatch(group_, &args, &tickets[0], &kept[0]), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_dispatch(group_, &args, &tickets[1], &kept[1]), EPD_OK) << epd_last_error();
  EXPECT_NE(kept[0] >> 40, kept[1] >> 40) << "a record was given out twice";
  EXPECT_EQ(epd_dispatch(group_, &args, &tickets[2], &kept[2]), EPD_RESOURCE_EXHAUSTED);
}

// The engine could not write `done`: its GPU has failed, or it has no lane any more.
TEST_F(ClientCuda, AFailureThatIsSeenReleasesTheStream) {
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
  EXPECT_GT(cuda_.stuck(stream_), 0u);
  daemon_.complete(all[0], StatusCode::kRankLost, 1, "rank 1 died");
  EXPECT_EQ(wait(tickets[0]), EPD_RANK_LOST);
  EXPECT_TRUE(cuda_.await_idle(stream_));
  EXPECT_EQ(at(done(0)), tickets[1]);
  EXPECT_EQ(cuda_.stuck(other_), 1u);
  EXPECT_EQ(at(done(3)), 0u);
  daemon_.complete(all[2], StatusCode::kRankLost, 1, "rank 1 died");
  EXPECT_EQ(wait(tickets[2]), EPD_RANK_LOST);
  EXPECT_TRUE(cuda_.await_idle(other_));
}

// Else the word would fall back behind what the engine writes for that one.
TEST_F(ClientCuda, TheSlotsNextOperationIsPublishedAfterTheRelease) {
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
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  EXPECT_EQ(wait(next), EPD_OK);
}

TEST_F(ClientCuda, WordsAreNotRenewedUnderAnOperationInFlight) {
  epd_ticket_t first = 0;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &first), EPD_OK) << epd_last_error();
  client::SessionTestAccess::set_last_ticket(session_, std::uint64_t{1} << 31);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("tickets ago");
  EXPECT_EQ(cuda_.enqueued_anywhere(), 2u);
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  end(*submission);
  EXPECT_EQ(wait(first), EPD_OK);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
}

// Nobody is in the library: the application sleeps in a call of CUDA's, for the stream.
TEST_F(ClientCuda, TheDaemonsDeathReleasesTheStreams) {
  epd_ticket_t first = 0;
  epd_ticket_t second = 0;
  ASSERT_EQ(dispatch(0, stream_, &first), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(3, other_, &second), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.stuck(stream_) + cuda_.stuck(other_), 2u);
  daemon_.hang_up();
  EXPECT_TRUE(cuda_.await_idle(stream_));
  EXPECT_TRUE(cuda_.await_idle(other_));
  EXPECT_EQ(at(done(0)), first);
  EXPECT_EQ(at(done(3)), second);
  EXPECT_EQ(epd_ticket_wait(group_, first, EPD_FOREVER, nullptr), EPD_DAEMON_LOST);
  // Whoever begins to wait now does not wait at all.
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, second, stream_), EPD_OK) << epd_last_error();
  EXPECT_TRUE(cuda_.await_idle(stream_));
  epd_ticket_t refused = 0;
  EXPECT_EQ(dispatch(0, stream_, &refused), EPD_DAEMON_LOST);
}

TEST_F(ClientCuda, ADaemonThatDiesWhileTheDriverMakesTheCallerWait) {
  epd_ticket_t first = 0;
  ASSERT_EQ(dispatch(0, stream_, &first), EPD_OK) << epd_last_error();
  // The queue is full until the stream goes on, which the daemon's death must bring about.
  cuda_.on_enqueue([&](CUstream stream, const StreamOp& op) {
    if (stream != stream_ || op.kind != StreamOp::kWrite) return;
    daemon_.hang_up();
    EXPECT_TRUE(cuda_.await_idle(stream_));
  });
  epd_ticket_t refused = 0;
  EXPECT_EQ(dispatch(1, stream_, &refused), EPD_DAEMON_LOST);
  EXPECT_TRUE(cuda_.await_idle(stream_));
}

TEST_F(ClientCuda, LeavingReleasesTheStreamsBeforeItUnmaps) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.stuck(stream_), 1u);
  epd_group_leave(group_);
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  EXPECT_EQ(cuda_.synchronized(), 1);
  EXPECT_EQ(cuda_.mapped_bytes(), 0u);
}

TEST_F(ClientCuda, AContextThatIsGoneHangsNobody) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, other_, &ticket, true), EPD_OK) << epd_last_error();
  cuda_.fail("cuCtxPushCurrent", CUDA_ERROR_DEINITIALIZED);
  daemon_.hang_up();
  EXPECT_EQ(epd_ticket_wait(group_, ticket, EPD_FOREVER, nullptr), EPD_DAEMON_LOST);
  detach();
  EXPECT_EQ(cuda_.mistakes(), std::vector<std::string>{"streams left"});  // with their context
  cuda_.fail("cuCtxPushCurrent", CUDA_SUCCESS);
  cuda_.set_current(RecordedCuda::context_of(1));
  RecordedCuda::table().cuStreamDestroy(nullptr);
  cuda_.set_current(nullptr);
}

// A word that was last written 2^31 tickets ago would look as if it were ahead.
TEST_F(ClientCuda, WordsAreRenewedBeforeTheyLookAhead) {
  const std::uint64_t far = (std::uint64_t{1} << 31) + 10;
  client::SessionTestAccess::set_last_ticket(session_, far);
  cuda_.hold(stream_, true);
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(ticket, far + 1);
  EXPECT_EQ(at(ready(0)), static_cast<std::uint32_t>(far));  // not yet
  EXPECT_EQ(at(done(0)), static_cast<std::uint32_t>(far));
  cuda_.hold(stream_, false);
  EXPECT_EQ(at(ready(0)), static_cast<std::uint32_t>(ticket));
  EXPECT_EQ(cuda_.stuck(stream_), 1u);
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  end(*submission);
  ASSERT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);
  // From here on the words are near.
  const std::size_t before = cuda_.enqueued_anywhere();
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.enqueued_anywhere(), before + 2);
}

TEST_F(ClientCuda, TheWrapperHasTheSame) {
  detach();  // the fake daemon serves one session
  epd::AttachOptions options;
  options.socket_path = daemon_.socket_path();
  epd::Config config;
  config.name = "w";
  config.num_ranks = 2;
  config.num_experts = 4;
  config.max_tokens = 8;
  config.hidden = 128;
  config.topk = 2;
  epd::Group group = epd::Session(options).join(config);
  const auto finish = [&] {
    const auto submission = daemon_.next_submission();
    ASSERT_TRUE(submission.has_value());
    const std::uintptr_t base = reinterpret_cast<std::uintptr_t>(group.buffers(0).x.data());
    cuda_.poke(base + arena().done_word(submission->slot), static_cast<std::uint32_t>(submission->ticket));
    daemon_.complete(*submission);
  };
  epd::DispatchOptions deferred;
  deferred.stream = stream_;
  deferred.defer_receive = true;
  epd::Dispatch dispatch = group.dispatch(0, 3, deferred);
  EXPECT_EQ(cuda_.enqueued(stream_).size(), 1u);
  dispatch.ticket.wait_on_stream(other_);
  EXPECT_EQ(cuda_.stuck(other_), 1u);
  finish();
  EXPECT_EQ(cuda_.stuck(other_), 0u);
  dispatch.ticket.wait(20'000);
  epd::CombineOptions by_default;
  by_default.stream = nullptr;  // CUDA's default stream
  epd::Ticket combine = group.combine(0, dispatch.handle, by_default);
  EXPECT_EQ(cuda_.enqueued(nullptr).size(), 2u);
  finish();
  combine.wait(20'000);
  epd::Ticket noop = group.noop_on_stream(1, stream_);
  EXPECT_EQ(cuda_.stuck(stream_), 1u);
  finish();
  noop.wait(20'000);
  // Submitted, though its stream does not wait: the ticket is the result's.
  cuda_.fail("cuStreamWaitValue32", CUDA_ERROR_LAUNCH_FAILED);
  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  args.on_stream = 1;
  epd::Dispatch failed;
  EXPECT_EQ(group.try_dispatch(args, failed), EPD_INTERNAL);
  EXPECT_TRUE(failed.ticket.valid());
  finish();
  failed.ticket.wait(20'000);
}

// ---- attaching -----------------------------------------------------------------------------------

class ClientCudaAttach : public ::testing::Test {
 protected:
  void SetUp() override { daemon_.set(cuda_settings()); }
  FakeDaemon daemon_;
  epd_session_t* session_ = nullptr;
};

TEST_F(ClientCudaAttach, AContextOfTheCallersOnThatDeviceIsUsed) {
  RecordedCuda cuda({0x11, kUuid});
  const CUcontext own = reinterpret_cast<CUcontext>(0xabc001);  // on device 1
  cuda.set_current(own);
  ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda.retained(), 0);
  EXPECT_EQ(cuda.current(), own);
  epd_session_detach(session_);
  EXPECT_EQ(cuda.current(), own);
  // One on another device is not, and stays current.
  const CUcontext elsewhere = RecordedCuda::context_of(0);
  cuda.set_current(elsewhere);
  ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda.retained(), 1);
  EXPECT_EQ(cuda.current(), elsewhere);
  epd_session_detach(session_);
  EXPECT_EQ(cuda.current(), elsewhere);
  EXPECT_EQ(cuda.retained(), 0);
  EXPECT_TRUE(cuda.mistakes().empty());
}

TEST_F(ClientCudaAttach, ADeviceThatIsNotVisible) {
  {
    RecordedCuda cuda({0x11, 0x22});
    EXPECT_EQ(attach_to(daemon_, &session_), EPD_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("cuda:3 is GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a");
    EXPECT_ERROR_HAS("visible: GPU-11111111-1111-1111-1111-111111111111, GPU-22222222-");
    EXPECT_EQ(cuda.retained(), 0);
  }
  RecordedCuda cuda({});
  cuda.fail("cuInit", CUDA_ERROR_NO_DEVICE);
  EXPECT_EQ(attach_to(daemon_, &session_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("visible: none");
}

TEST_F(ClientCudaAttach, StepsThatFailLeaveNothingBehind) {
  RecordedCuda cuda({kUuid});
  for (const char* step :
       {"cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuStreamCreateWithPriority"}) {
    cuda.fail(step, CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_EQ(attach_to(daemon_, &session_), EPD_INTERNAL) << step;
    EXPECT_ERROR_HAS("CUDA_ERROR_LAUNCH_FAILED");
    cuda.fail(step, CUDA_SUCCESS);
    EXPECT_EQ(cuda.retained(), 0) << step;
  }
  ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
  const epd_group_config_t config = small_config();
  std::size_t left = daemon_.left();
  for (const char* step : {"cuMemGetAllocationGranularity", "cuMemImportFromShareableHandle",
                           "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    cuda.fail(step, CUDA_ERROR_OUT_OF_MEMORY);
    epd_group_t* group = nullptr;
    EXPECT_EQ(epd_group_join(session_, &config, &group), EPD_RESOURCE_EXHAUSTED) << step;
    EXPECT_ERROR_HAS(step);
    EXPECT_EQ(daemon_.left(), ++left) << step;
    EXPECT_EQ(cuda.mapped_bytes(), 0u) << step;
    cuda.fail(step, CUDA_SUCCESS);
  }
  epd_session_detach(session_);
  for (const std::string& mistake : cuda.mistakes()) ADD_FAILURE() << mistake;
}

client::Status no_driver(const client::CudaDriver*&) {
  return {StatusCode::kUnsupported, "no libcuda.so.1"};
}

TEST_F(ClientCudaAttach, WithoutADriver) {
  client::cuda_loader = &no_driver;
  EXPECT_EQ(attach_to(daemon_, &session_), EPD_UNSUPPORTED);
  EXPECT_ERROR_HAS("no libcuda.so.1");
  client::cuda_loader = &client::load_cuda_driver;
  const client::CudaDriver* driver = nullptr;
  if (client::load_cuda_driver(driver).ok()) GTEST_SKIP() << "this machine has a driver";
  EXPECT_EQ(attach_to(daemon_, &session_), EPD_UNSUPPORTED);
  EXPECT_ERROR_HAS("libcuda.so.1");
}

TEST(ClientCudaHost, HostDevicesHaveNoStreams) {
  FakeDaemon daemon;
  epd_session_t* session = nullptr;
  ASSERT_EQ(attach_to(daemon, &session), EPD_OK) << epd_last_error();
  const epd_group_config_t config = small_config();
  epd_group_t* group = nullptr;
  ASSERT_EQ(epd_group_join(session, &config, &group), EPD_OK);
  epd_session_info_t info = EPD_SESSION_INFO_INIT;
  ASSERT_EQ(epd_session_info(session, &info), EPD_OK);
  EXPECT_EQ(info.device_kind, EPD_DEVICE_HOST);
  epd_ticket_t ticket = 0;
  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  args.on_stream = 1;
  EXPECT_EQ(epd_dispatch(group, &args, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("on_stream is 1; allowed: on a CUDA device");
  EXPECT_ERROR_HAS("host:3");
  EXPECT_EQ(epd_noop_on_stream(group, 0, nullptr, &ticket), EPD_INVALID_ARGUMENT);
  EXPECT_EQ(ticket, 0u);
  epd_session_detach(session);
}

}  // namespace
}  // namespace epd::testing
