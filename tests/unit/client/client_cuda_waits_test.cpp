// The client library on a CUDA device: by what a stream waits, who chooses it, and that it ends.
#include "client_cuda_fixture.h"
#include "epd/epd.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace epd::testing {
namespace {

constexpr char kVariable[] = "EPD_WAIT_BY";

class ClientCudaWaits : public ClientCudaBase {
 protected:
  void SetUp() override {
    ::unsetenv(kVariable);
    ClientCudaBase::SetUp();
    if (!kHasKernels) GTEST_SKIP() << "this libepd has no kernels: no nvcc";
  }
  void TearDown() override {
    ::unsetenv(kVariable);
    ClientCudaBase::TearDown();
  }
  // The kernel that the last operation in the stream was a part of.
  std::string last_kernel(CUstream stream) {
    const std::vector<StreamOp> all = cuda_.enqueued(stream);
    if (all.empty()) return "nothing";
    return all.back().kernel != nullptr ? all.back().kernel : "none";
  }
  void finish(epd_ticket_t ticket) {
    const auto submission = daemon_.next_submission();
    ASSERT_TRUE(submission.has_value());
    EXPECT_EQ(submission->ticket, ticket);
    end(*submission);
    EXPECT_EQ(wait(ticket), EPD_OK) << epd_last_error();
  }
};

// Later a kernel of the engine's may run that they are waited for by, and nothing can be loaded.
TEST_F(ClientCudaWaits, AttachingLoadsTheKernels) {
  EXPECT_EQ(cuda_.loaded(), (std::vector<std::string>{"epd::dispatch", "epd::combine", "epd::barrier"}));
  for (const std::string& kernel : cuda_.loaded()) EXPECT_TRUE(cuda_.prefers_shared_memory(kernel)) << kernel;
  EXPECT_EQ(cuda_.enqueued_anywhere(), 0u);
}

TEST_F(ClientCudaWaits, WithoutKernelsMemopWaitsRemain) {
  for (const char* step : {"cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "epd::dispatch",
                           "epd::combine", "epd::barrier"}) {
    SCOPED_TRACE(step);
    cuda_.fail(step, CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_INTERNAL);
    EXPECT_ERROR_HAS("waiting by kernel: loading libepd's kernels: CUDA_ERROR_LAUNCH_FAILED");
    ASSERT_EQ(attach_again(EPD_WAIT_BY_MEMOP), EPD_OK) << epd_last_error();
    cuda_.fail(step, CUDA_SUCCESS);
    epd_ticket_t ticket = 0;
    ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(stream_), "none");
    EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(other_), "none");
    finish(ticket);
  }
  cuda_.fail("cuLibraryLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_UNSUPPORTED);
  EXPECT_ERROR_HAS("no kernels for this GPU; allowed: EPD_WAIT_BY_MEMOP");
}

TEST_F(ClientCudaWaits, OtherValuesAreRefused) {
  epd_ticket_t ticket = 0;
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.row_format = 7;
  EXPECT_EQ(epd_dispatch(group_, &args, stream_, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("row_format is 7; allowed: 0 .. 0");
  epd_combine_args_t combine_args;
  epd_combine_args_init(&combine_args);
  combine_args.num_tokens = 1;
  EXPECT_EQ(epd_combine(group_, &combine_args, stream_, &ticket), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens is 1; allowed: 0 without memory");
  EXPECT_EQ(cuda_.enqueued_anywhere(), 0u);
  for (const std::uint32_t number : {3u, 4'000'000'000u}) {
    epd_wait_by_t wrong;
    std::memcpy(&wrong, &number, sizeof(wrong));
    EXPECT_EQ(attach_again(wrong), EPD_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("wait_by is " + std::to_string(number) +
                     "; allowed: 0 (EPD_WAIT_BY_MEMOP), 1 (EPD_WAIT_BY_KERNEL) or 2 (EPD_WAIT_BY_EVENT)");
  }
  ::setenv(kVariable, "Kernel", 1);
  EXPECT_EQ(attach_again(EPD_WAIT_BY_MEMOP), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("EPD_WAIT_BY is \"Kernel\"; allowed: event, kernel or memop");
  EXPECT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_OK) << "what is given goes before what is around";
}

// All that is enqueued for a session waits as its attach has said.
TEST_F(ClientCudaWaits, TheSessionChooses) {
  const struct {
    const char* around;
    epd_wait_by_t given;
    bool by_kernel;
  } cases[] = {{nullptr, EPD_WAIT_BY_MEMOP, false}, {"", EPD_WAIT_BY_MEMOP, false},
               {"memop", EPD_WAIT_BY_MEMOP, false}, {"kernel", EPD_WAIT_BY_MEMOP, true},
               {"memop", EPD_WAIT_BY_KERNEL, true}, {nullptr, EPD_WAIT_BY_KERNEL, true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(std::string(c.around != nullptr ? c.around : "nothing") + ", " + std::to_string(c.given));
    ::unsetenv(kVariable);
    if (c.around != nullptr) ::setenv(kVariable, c.around, 1);
    ASSERT_EQ(attach_again(c.given), EPD_OK) << epd_last_error();
    epd_ticket_t ticket = 0;
    epd_handle_t handle = 0;
    ASSERT_EQ(dispatch(0, stream_, &ticket, false, &handle), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(stream_), c.by_kernel ? "epd::dispatch" : "none");
    ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(other_), c.by_kernel ? "epd::dispatch" : "none");
    finish(ticket);
    ASSERT_EQ(combine(0, stream_, handle, &ticket), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(stream_), c.by_kernel ? "epd::combine" : "none");
    finish(ticket);
    ASSERT_EQ(noop(0, stream_, &ticket), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(stream_), c.by_kernel ? "epd::barrier" : "none");
    finish(ticket);
  }
}

// A kernel that waits might hold the GPU that the other rank needs before it can end the wait.
TEST_F(ClientCudaWaits, NoKernelWaitsWhereRanksShareTheGpu) {
  FakeSettings settings = cuda_settings();
  settings.shares_device = true;
  daemon_.set(settings);
  ASSERT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_OK) << epd_last_error();
  epd_ticket_t ticket = 0;
  for (const bool deferred : {false, true}) {
    ASSERT_EQ(dispatch(0, stream_, &ticket, deferred), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(stream_), "none");
    ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(other_), "none");
    finish(ticket);
  }
}

TEST_F(ClientCudaWaits, ADeferredOperationLeavesNoKernelUntilTheHook) {
  ASSERT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_OK) << epd_last_error();
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket, true), EPD_OK) << epd_last_error();
  EXPECT_EQ(last_kernel(stream_), "epd::dispatch");
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  for (const CUstream stream : {stream_, other_}) {
    ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, stream), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(stream), "epd::dispatch");
  }
  EXPECT_EQ(cuda_.stuck(stream_) + cuda_.stuck(other_), 2u);
  finish(ticket);
  EXPECT_EQ(cuda_.stuck(stream_) + cuda_.stuck(other_), 0u);
}

TEST_F(ClientCudaWaits, AKernelThatCanNotBeLaunched) {
  ASSERT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_OK) << epd_last_error();
  epd_ticket_t ticket = 0;
  cuda_.fail("cuStreamIsCapturing", CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_INTERNAL);
  EXPECT_ERROR_HAS("cuStreamIsCapturing: CUDA_ERROR_INVALID_HANDLE");
  EXPECT_EQ(ticket, 0u);
  EXPECT_FALSE(daemon_.next_submission(0).has_value());
  cuda_.fail("cuStreamIsCapturing", CUDA_SUCCESS);
  cuda_.fail("epd::dispatch", CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(dispatch(0, stream_, &ticket, true), EPD_INTERNAL);
  EXPECT_ERROR_HAS("epd::dispatch: CUDA_ERROR_LAUNCH_FAILED");
  EXPECT_EQ(ticket, 0u);
  EXPECT_FALSE(daemon_.next_submission(0).has_value());
  // The stream is good, so this can only be the end of its context.
  cuda_.fail("epd::dispatch", CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_INTERNAL);
  EXPECT_ERROR_HAS("was submitted and is valid, but the stream neither lets it begin nor waits for it");
  const auto submission = daemon_.next_submission();
  ASSERT_TRUE(submission.has_value());
  EXPECT_EQ(submission->ticket, ticket);
  EXPECT_EQ(at(ready(0)), 0u);
  end(*submission, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(wait(ticket), EPD_DEADLINE_EXCEEDED);
}

// Nobody writes the word: this device's engine is stopped.
TEST_F(ClientCudaWaits, AKernelGoesOnByItselfInTheEnd) {
  ASSERT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_OK) << epd_last_error();
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.timeout_ms = 7'000;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, stream_, &ticket, nullptr), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
  // Its own deadline and five seconds, from when the stream gets there at the earliest.
  for (const CUstream stream : {stream_, other_}) {
    const std::uint64_t limit_ns = cuda_.enqueued(stream).back().limit_ns;
    EXPECT_LE(limit_ns, 12'000'000'000u);
    EXPECT_GE(limit_ns, 5'000'000'000u);
  }
  EXPECT_GT(cuda_.enqueued(stream_).back().limit_ns, cuda_.enqueued(other_).back().limit_ns);
  cuda_.pass_limits();
  EXPECT_EQ(cuda_.stuck(stream_) + cuda_.stuck(other_), 0u);
  EXPECT_EQ(epd_ticket_pending(group_, ticket), 1);
  finish(ticket);
}

TEST_F(ClientCudaWaits, TheWrapperHasTheSame) {
  detach();  // the fake daemon serves one session
  epd::AttachOptions options;
  options.socket_path = daemon_.socket_path();
  options.wait_by = EPD_WAIT_BY_KERNEL;
  epd::Config config;
  config.name = "w";
  config.num_ranks = 2;
  config.num_experts = 4;
  config.max_tokens = 8;
  config.hidden = 128;
  config.topk = 2;
  epd::Group group = epd::Session(options).join(config);
  const auto finish = [&](epd::Ticket& ticket) {
    const auto submission = daemon_.next_submission();
    ASSERT_TRUE(submission.has_value());
    const std::uintptr_t base = reinterpret_cast<std::uintptr_t>(group.buffers(0).x.data());
    cuda_.poke(base + arena().done_word(submission->slot), static_cast<std::uint32_t>(submission->ticket));
    daemon_.complete(*submission);
    ticket.wait(20'000);
  };
  epd::Dispatch dispatch = group.dispatch(0, 3, stream_);
  EXPECT_EQ(last_kernel(stream_), "epd::dispatch");
  dispatch.ticket.wait_on_stream(other_);
  EXPECT_EQ(last_kernel(other_), "epd::dispatch");
  finish(dispatch.ticket);
  epd::Ticket combine = group.combine(0, dispatch.handle, stream_);
  EXPECT_EQ(last_kernel(stream_), "epd::combine");
  finish(combine);
  epd::Ticket noop = group.noop(1, stream_);
  EXPECT_EQ(last_kernel(stream_), "epd::barrier");
  finish(noop);
}

// ---- whoever dies, nobody is in the library -------------------------------------------------------

TEST_P(ClientCuda, AnEvictionReleasesTheStreams) {
  epd_ticket_t first = 0;
  epd_ticket_t second = 0;
  ASSERT_EQ(dispatch(0, stream_, &first), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(1, stream_, &second, true), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, second, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(waits_in(other_), 1u);
  daemon_.end_session(StatusCode::kPermissionDenied, "the operator said so");
  daemon_.hang_up();
  EXPECT_TRUE(cuda_.await_idle(stream_));
  EXPECT_TRUE(cuda_.await_idle(other_));
  EXPECT_EQ(wait(first), EPD_PERMISSION_DENIED);
  EXPECT_EQ(wait(second), EPD_PERMISSION_DENIED);
}

// An engine that outlives its daemon gives up the first operation, and then ends too.
TEST_P(ClientCuda, AWordThatFallsBackAfterTheReleaseIsWrittenAgain) {
  epd_ticket_t tickets[2];
  for (epd_ticket_t& ticket : tickets) ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  cuda_.hold(stream_, true);
  daemon_.hang_up();
  for (int i = 0; i < 10'000 && at(done(0)) != tickets[1]; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  cuda_.poke(done(0), static_cast<std::uint32_t>(tickets[0]));
  cuda_.hold(stream_, false);
  EXPECT_TRUE(cuda_.await_idle(stream_));
  EXPECT_EQ(at(done(0)), tickets[1]);
  cuda_.poke(done(0), static_cast<std::uint32_t>(tickets[0]));
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, tickets[1], other_), EPD_OK) << epd_last_error();
  EXPECT_TRUE(cuda_.await_idle(other_));
}

TEST_P(ClientCuda, DetachingReleasesTheStreamsBeforeItUnmaps) {
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(1, other_, &ticket, true), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(waits_in(stream_) + waits_in(other_), 2u);
  detach();  // the driver records a mistake if it is unmapped too early
  EXPECT_EQ(waits_in(stream_) + waits_in(other_), 0u);
}

}  // namespace
}  // namespace epd::testing
