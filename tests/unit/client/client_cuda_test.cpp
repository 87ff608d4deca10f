// The client library on a CUDA device: memory, words in streams, attaching.
#include "client_cuda_fixture.h"
#include "epd/epd.hpp"

#include <cstdlib>
#include <functional>
#include <future>
#include <thread>

namespace epd::testing {
namespace {

const char* name_of(epd_wait_by_t by) {
  return by == EPD_WAIT_BY_EVENT ? "Event" : by == EPD_WAIT_BY_KERNEL ? "Kernel" : "Memop";
}

INSTANTIATE_TEST_SUITE_P(By, ClientCuda,
                         ::testing::Values(EPD_WAIT_BY_MEMOP, EPD_WAIT_BY_KERNEL, EPD_WAIT_BY_EVENT),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

TEST_F(ClientCudaBase, MapsTheArenaOfTheDeviceWithThatUuid) {
  epd_session_info_t info;
  epd_session_info_init(&info);
  ASSERT_EQ(epd_session_info(session_, &info), EPD_OK);
  EXPECT_EQ(info.device_kind, EPD_DEVICE_KIND_CUDA);
  EXPECT_EQ(cuda_.retained(), 1);
  const std::size_t granularity = std::size_t{2} << 20;
  EXPECT_EQ(cuda_.mapped_bytes(), abi::align_up(arena().total_bytes, granularity));
  // The same memory as the daemon's, at the layout's places.
  epd_buffers_t buffers;
  epd_buffers_init(&buffers);
  ASSERT_EQ(epd_group_buffers(group_, 1, &buffers), EPD_OK);
  *static_cast<std::uint16_t*>(buffers.x) = 0x1234;
  EXPECT_EQ(*daemon_.member().user.as<std::uint16_t>(arena().at(1, abi::Region::kX)), 0x1234);
  epd_group_leave(group_);
  EXPECT_EQ(cuda_.mapped_bytes(), 0u);
  EXPECT_EQ(cuda_.synchronized(), 1);
}

TEST_F(ClientCudaBase, WithoutAStreamNothingIsEnqueued) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(submission->flags & abi::kFlagStream, 0u);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket, stream_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("is of an operation with EPD_NO_STREAM; allowed: those submitted in a stream");
  daemon_.complete(*submission);
  EXPECT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);
  EXPECT_EQ(cuda_.enqueued_anywhere(), 0u);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket, EPD_NO_STREAM), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("stream is EPD_NO_STREAM; allowed: a stream");
}

TEST_P(ClientCuda, WritesReadyThenPublishesThenWaits) {
  std::optional<abi::Submission> submission;
  cuda_.on_enqueue([&](CUstream, const StreamOp& op) {
    if (by_event() && op.kind == StreamOp::kCheck) return;  // before the write, and before the event
    auto found = daemon_.next_submission(0);
    // One kernel for both is launched when it is clear that there is something to wait for.
    EXPECT_EQ(found.has_value(), op.kind == (by_kernel() ? StreamOp::kWrite : StreamOp::kWait));
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
  for (const StreamOp& op : ops) EXPECT_STREQ(op.kernel, by_kernel() ? "epd::dispatch" : nullptr);
  expect(ops[0], StreamOp::kWrite, ready(2), ticket);
  expect(ops[1], StreamOp::kWait, done(2), ticket);
  EXPECT_EQ(at(ready(2)), ticket);
  EXPECT_EQ(waits_in(stream_), 1u);
  cuda_.on_enqueue(nullptr);
  end(*submission);
  EXPECT_EQ(waits_in(stream_), 0u);
  EXPECT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);

  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.slot = 2;
  args.handle = handle;
  // NULL is a stream: CUDA's default one.
  ASSERT_EQ(epd_combine(group_, &args, nullptr, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.enqueued(nullptr).size(), 2u);
  submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(submission->flags, std::uint32_t{abi::kFlagStream});
  end(*submission);
  ASSERT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);

  ASSERT_EQ(noop(2, stream_, &ticket), EPD_OK) << epd_last_error();
  submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(submission->flags, std::uint32_t{abi::kFlagStream});
  EXPECT_EQ(waits_in(stream_), 1u);
  end(*submission, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(waits_in(stream_), 0u);
  EXPECT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_DEADLINE_EXCEEDED);
}

TEST_P(ClientCuda, ARefusedSubmissionEnqueuesNothing) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  const std::size_t before = cuda_.enqueued_anywhere();
  epd_ticket_t refused = 0;
  EXPECT_EQ(dispatch(0, other_, &refused), EPD_WOULD_BLOCK);  // the slot is busy
  EXPECT_EQ(dispatch(99, stream_, &refused), EPD_INVALID_ARGUMENT);
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.slot = 1;
  args.handle = 12345;
  EXPECT_EQ(epd_combine(group_, &args, stream_, &refused), EPD_NOT_FOUND);
  args.weighted = 2;
  EXPECT_EQ(epd_combine(group_, &args, stream_, &refused), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("weighted is 2; allowed: 0 or 1");
  cuda_.set_current(cuda_.context());
  ASSERT_EQ(cuStreamBeginCapture(other_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
  EXPECT_EQ(dispatch(1, other_, &refused), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("stream captures a graph");
  CUgraph graph = nullptr;
  ASSERT_EQ(cuStreamEndCapture(other_, &graph), CUDA_SUCCESS);
  cuGraphDestroy(graph);
  cuda_.set_current(nullptr);
  daemon_.set_submission_head(1 - abi::kSubmissionSlots);  // the ring is full
  EXPECT_EQ(dispatch(1, stream_, &refused), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("ring is full");
  daemon_.set_submission_head(0);
  daemon_.write_board(abi::GroupState::kBroken, 1, 0, StatusCode::kEngineRestarted, "it fell");
  EXPECT_EQ(dispatch(1, stream_, &refused), EPD_ENGINE_RESTARTED);
  EXPECT_EQ(refused, 0u);
  EXPECT_EQ(cuda_.enqueued_anywhere(), before);
}

// With a KERNEL wait nothing has been written then, but the stream has been looked at.
TEST_P(ClientCuda, ASessionThatEndsAfterTheWritePublishesNothing) {
  const StreamOp::Kind last = by_kernel() ? StreamOp::kCheck : StreamOp::kWrite;
  cuda_.on_enqueue([&, last](CUstream stream, const StreamOp& op) {
    if (stream == stream_ && op.kind == last)
      daemon_.end_session(StatusCode::kPermissionDenied, "the operator said so");
  });
  epd_ticket_t ticket = 0;
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_PERMISSION_DENIED);
  EXPECT_EQ(ticket, 0u);
  EXPECT_FALSE(daemon_.next_submission(0).has_value());
  EXPECT_EQ(waits_in(stream_), 0u);
}

// Its ready word has been written: no later operation may take that for its own.
TEST_F(ClientCudaBase, ATicketThatWasWrittenButNotSubmittedIsUsedUp) {
  epd_ticket_t ticket = 0;
  cuda_.on_enqueue([&](CUstream, const StreamOp& op) {
    if (op.kind == StreamOp::kWrite)
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

TEST_F(ClientCudaBase, DriverErrors) {
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

TEST_P(ClientCuda, DeferReceiveLeavesTheWaitToItsHook) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket, true), EPD_OK) << epd_last_error();
  ASSERT_EQ(cuda_.enqueued(stream_).size(), 1u);
  EXPECT_EQ(waits_in(stream_), 0u);
  EXPECT_STREQ(cuda_.enqueued(stream_)[0].kernel, by_kernel() ? "epd::dispatch" : nullptr);
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, stream_), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
  ASSERT_EQ(cuda_.enqueued(stream_).size(), 2u);
  EXPECT_STREQ(cuda_.enqueued(stream_)[1].kernel, by_kernel() ? "epd::dispatch" : nullptr);
  expect(cuda_.enqueued(stream_)[1], StreamOp::kWait, done(0), ticket);
  // A stream that comes later waits for the event.
  if (by_event())
    EXPECT_EQ(waits_in(other_), 1u);
  else
    expect(cuda_.enqueued(other_)[0], StreamOp::kWait, done(0), ticket);
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  daemon_.publish_sent(*submission);
  EXPECT_EQ(epd_ticket_wait_sent(group_, ticket, 20'000), EPD_OK);
  EXPECT_EQ(waits_in(stream_), 1u);
  end(*submission);
  EXPECT_EQ(waits_in(stream_) + waits_in(other_), 0u);
  // Also when it has ended, until the ticket is retired.
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK);
  EXPECT_EQ(waits_in(other_), 0u);
  ASSERT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_NOT_FOUND);
}

// Nobody is in the library: the application sleeps in a call of CUDA's, for the stream.
TEST_P(ClientCuda, TheDaemonsDeathReleasesTheStreams) {
  epd_ticket_t first = 0;
  epd_ticket_t second = 0;
  ASSERT_EQ(dispatch(0, stream_, &first), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(3, other_, &second), EPD_OK) << epd_last_error();
  EXPECT_EQ(waits_in(stream_) + waits_in(other_), 2u);
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

TEST_P(ClientCuda, ADaemonThatDiesWhileTheDriverMakesTheCallerWait) {
  epd_ticket_t first = 0;
  ASSERT_EQ(dispatch(0, stream_, &first), EPD_OK) << epd_last_error();
  // The queue is full until the stream goes on, which the daemon's death must bring about.
  cuda_.on_enqueue([&](CUstream stream, const StreamOp& op) {
    if (stream != stream_ || op.kind != StreamOp::kWrite) return;
    daemon_.hang_up();
    EXPECT_TRUE(cuda_.await_idle(stream_));
  });
  epd_ticket_t second = 0;
  if (by_kernel()) {  // which was submitted before
    EXPECT_EQ(dispatch(1, stream_, &second), EPD_OK) << epd_last_error();
    EXPECT_EQ(wait(second), EPD_DAEMON_LOST);
  } else {
    EXPECT_EQ(dispatch(1, stream_, &second), EPD_DAEMON_LOST);
    EXPECT_EQ(second, 0u);
  }
  EXPECT_TRUE(cuda_.await_idle(stream_));
}

TEST_P(ClientCuda, LeavingReleasesTheStreamsBeforeItUnmaps) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(waits_in(stream_), 1u);
  epd_group_leave(group_);
  EXPECT_EQ(waits_in(stream_), 0u);
  EXPECT_EQ(cuda_.synchronized(), 1);
  EXPECT_EQ(cuda_.mapped_bytes(), 0u);
}

// Each group's leave waits for all streams of the context, which may wait for another group's operations.
TEST_P(ClientCuda, DetachingUnblocksAllGroupsFirst) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  epd_group_t* second = nullptr;
  const epd_group_config_t config = small_config();
  ASSERT_EQ(epd_group_join(session_, &config, &second), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_noop(second, 0, other_, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(waits_in(stream_) + waits_in(other_), 2u);
  const std::uintptr_t word = done(0);
  auto detached = std::async(std::launch::async, [this] { detach(); });
  const bool in_time = detached.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  EXPECT_TRUE(in_time);
  if (!in_time) cuda_.poke(word, static_cast<std::uint32_t>(ticket));
  detached.get();
  EXPECT_EQ(waits_in(stream_) + waits_in(other_), 0u);
}

TEST_P(ClientCuda, AContextThatIsGoneHangsNobody) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, other_, &ticket, true), EPD_OK) << epd_last_error();
  for (const char* function : {"cuCtxGetCurrent", "cuCtxPushCurrent"})
    cuda_.fail(function, CUDA_ERROR_DEINITIALIZED);
  daemon_.hang_up();
  EXPECT_EQ(epd_ticket_wait(group_, ticket, EPD_FOREVER, nullptr), EPD_DAEMON_LOST);
  detach();
  EXPECT_EQ(cuda_.mistakes(), std::vector<std::string>{"streams left"});  // with their context
  cuda_.allow_streams(1);
  for (const char* function : {"cuCtxGetCurrent", "cuCtxPushCurrent"}) cuda_.fail(function, CUDA_SUCCESS);
}

// A word that was last written 2^31 tickets ago would look as if it were ahead.
TEST_P(ClientCuda, WordsAreRenewedBeforeTheyLookAhead) {
  const std::uint64_t far = (std::uint64_t{1} << 31) + 10;
  start_after(session_, far);
  cuda_.hold(stream_, true);
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(ticket, far + 1);
  EXPECT_EQ(at(ready(0)), static_cast<std::uint32_t>(far));  // not yet
  EXPECT_EQ(at(done(0)), static_cast<std::uint32_t>(far));
  cuda_.hold(stream_, false);
  EXPECT_EQ(at(ready(0)), static_cast<std::uint32_t>(ticket));
  EXPECT_EQ(waits_in(stream_), 1u);
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  end(*submission);
  ASSERT_EQ(epd_ticket_wait(group_, ticket, 20'000, nullptr), EPD_OK);
  // From here on the words are near.
  const std::size_t before = cuda_.enqueued_anywhere();
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.enqueued_anywhere(), before + 2);
}

TEST_F(ClientCudaBase, TheWrapperHasTheSame) {
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
  deferred.defer_receive = true;
  epd::Dispatch dispatch = group.dispatch(0, 3, stream_, deferred);
  EXPECT_EQ(cuda_.enqueued(stream_).size(), 1u);
  dispatch.ticket.wait_on_stream(other_);
  EXPECT_EQ(cuda_.stuck(other_), 1u);
  finish();
  EXPECT_EQ(cuda_.stuck(other_), 0u);
  dispatch.ticket.wait(20'000);
  epd::Ticket combine = group.combine(0, dispatch.handle, nullptr);  // CUDA's default stream
  EXPECT_EQ(cuda_.enqueued(nullptr).size(), 2u);
  finish();
  combine.wait(20'000);
  epd::Ticket noop = group.noop(1, stream_);
  EXPECT_EQ(cuda_.stuck(stream_), 1u);
  finish();
  noop.wait(20'000);
  // Submitted, though its stream does not wait: the ticket is the result's.
  cuda_.fail("cuStreamWaitValue32", CUDA_ERROR_LAUNCH_FAILED);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  epd::Dispatch failed;
  EXPECT_EQ(group.try_dispatch(args, nullptr, failed), EPD_INTERNAL);
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
  WatchedCuda cuda;
  CUcontext own = nullptr;
  ASSERT_EQ(cuCtxCreate(&own, nullptr, 0, WatchedCuda::kDevice), CUDA_SUCCESS);
  ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda.retained(), 0);
  EXPECT_EQ(cuda.current(), own);
  epd_session_detach(session_);
  EXPECT_EQ(cuda.current(), own);
  // One on another device is not, and stays current.
  CUcontext elsewhere = nullptr;
  ASSERT_EQ(cuCtxCreate(&elsewhere, nullptr, 0, 0), CUDA_SUCCESS);
  cuda.set_current(elsewhere);
  ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda.retained(), 1);
  EXPECT_EQ(cuda.current(), elsewhere);
  epd_session_detach(session_);
  EXPECT_EQ(cuda.current(), elsewhere);
  EXPECT_EQ(cuda.retained(), 0);
  EXPECT_TRUE(cuda.mistakes().empty());
  for (const CUcontext context : {own, elsewhere}) EXPECT_EQ(cuCtxDestroy(context), CUDA_SUCCESS);
}

TEST_F(ClientCudaAttach, ADeviceThatIsNotVisible) {
  WatchedCuda cuda;
  FakeSettings settings = cuda_settings();
  settings.device_uuid.fill(0x5a);
  daemon_.set(settings);
  EXPECT_EQ(attach_to(daemon_, &session_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("cuda:3 is GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a");
  EXPECT_ERROR_HAS(
      "visible: GPU-fa4e4750-5520-6f66-206e-6f206b657201, GPU-fa4e4750-5520-6f66-206e-6f206b657202,");
  EXPECT_EQ(cuda.retained(), 0);
  cuda.fail("cuInit", CUDA_ERROR_NO_DEVICE);
  EXPECT_EQ(attach_to(daemon_, &session_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("visible: none");
}

TEST_F(ClientCudaAttach, StepsThatFailLeaveNothingBehind) {
  WatchedCuda cuda;
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

TEST(ClientCudaHost, HostDevicesHaveNoStreams) {
  FakeDaemon daemon;
  epd_session_t* session = nullptr;
  ASSERT_EQ(attach_to(daemon, &session), EPD_OK) << epd_last_error();
  const epd_group_config_t config = small_config();
  epd_group_t* group = nullptr;
  ASSERT_EQ(epd_group_join(session, &config, &group), EPD_OK);
  epd_session_info_t info;
  epd_session_info_init(&info);
  ASSERT_EQ(epd_session_info(session, &info), EPD_OK);
  EXPECT_EQ(info.device_kind, EPD_DEVICE_KIND_HOST);
  epd_ticket_t ticket = 0;
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  EXPECT_EQ(epd_dispatch(group, &args, nullptr, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS(
      "stream is NULL, CUDA's legacy default stream; allowed: EPD_NO_STREAM, as this session's device is "
      "host:3");
  const std::uint32_t n = 0;
  args.num_tokens_at = &n;
  EXPECT_EQ(epd_dispatch(group, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens_at is given; allowed: NULL, but on GPUs");
  int no_stream = 0;
  EXPECT_EQ(epd_noop(group, 0, &no_stream, &ticket), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("stream is " + std::to_string(reinterpret_cast<std::uintptr_t>(&no_stream)) + "; allowed");
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  EXPECT_EQ(epd_combine(group, &combine, nullptr, &ticket), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("stream is NULL");
  EXPECT_EQ(ticket, 0u);
  epd_session_detach(session);
}

}  // namespace
}  // namespace epd::testing
