// The client library on a GPU: memory, streams that must continue, attaching.
#include "client_cuda_fixture.h"

#include <cstdlib>
#include <future>

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
  EXPECT_EQ(cuda_.mapped_bytes(),
            abi::align_up(arena().total_bytes, granularity) +
                abi::align_up(abi::ResultsLayout(member_->shape).total_bytes, granularity));
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

TEST_P(ClientCuda, DeferReceiveLeavesTheWaitToItsHook) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket, true), EPD_OK) << epd_last_error();
  ASSERT_EQ(cuda_.enqueued(stream_).size(), 1u);
  EXPECT_EQ(waits_in(stream_), 0u);
  EXPECT_STREQ(cuda_.enqueued(stream_)[0].kernel, "epd::dispatch");
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, stream_), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
  ASSERT_EQ(cuda_.enqueued(stream_).size(), 2u);
  EXPECT_STREQ(cuda_.enqueued(stream_)[1].kernel, by_kernel() ? "epd::dispatch" : nullptr);
  EXPECT_EQ(waits_in(stream_), 1u);
  EXPECT_EQ(waits_in(other_), 1u);
  end_call();
  EXPECT_EQ(waits_in(stream_) + waits_in(other_), 0u);
  // Also when it has ended.
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK);
  EXPECT_EQ(waits_in(other_), 0u);
  EXPECT_EQ(wait(ticket), EPD_OK);
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
  EXPECT_EQ(epd_ticket_wait(group_, first, EPD_FOREVER, nullptr), EPD_DAEMON_LOST);
  // A stream that begins to wait now does not wait at all.
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, second, stream_), EPD_OK) << epd_last_error();
  EXPECT_TRUE(cuda_.await_idle(stream_));
  epd_ticket_t refused = 0;
  EXPECT_EQ(dispatch(0, stream_, &refused), EPD_DAEMON_LOST);
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
  auto detached = std::async(std::launch::async, [this] { detach(); });
  const bool in_time = detached.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  EXPECT_TRUE(in_time);
  if (!in_time) cuda_.pass_limits();
  detached.get();
  EXPECT_EQ(waits_in(stream_) + waits_in(other_), 0u);
}

TEST_P(ClientCuda, AContextThatIsGoneHangsNobody) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, other_, &ticket, true), EPD_OK) << epd_last_error();
  cuda_.settle();  // a context that is gone runs nothing of its streams, the fake driver would
  for (const char* function : {"cuCtxGetCurrent", "cuCtxPushCurrent"})
    cuda_.fail(function, CUDA_ERROR_DEINITIALIZED);
  daemon_.hang_up();
  EXPECT_NE(epd_ticket_wait(group_, ticket, EPD_FOREVER, nullptr), EPD_OK) << "no daemon, no context";
  detach();
  EXPECT_EQ(cuda_.mistakes(), std::vector<std::string>{"streams left"});  // with their context
  cuda_.allow_streams(1);
  for (const char* function : {"cuCtxGetCurrent", "cuCtxPushCurrent"}) cuda_.fail(function, CUDA_SUCCESS);
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
  EXPECT_ERROR_HAS("num_tokens_at is given with EPD_NO_STREAM; allowed: NULL, or on a GPU");
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
