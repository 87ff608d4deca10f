// The client library on a GPU: by what a stream waits, who chooses it, and that it ends.
#include "client_cuda_fixture.h"

#include <cstdlib>
#include <cstring>

namespace epd::testing {
namespace {

constexpr char kVariable[] = "EPD_WAIT_BY";

class ClientCudaWaits : public ClientCudaBase {
 protected:
  void SetUp() override {
    ::unsetenv(kVariable);
    ClientCudaBase::SetUp();
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
    end_call();
    EXPECT_EQ(wait(ticket), EPD_OK) << epd_last_error();
  }
};

// Later a kernel of the engine's may run that they are waited for by, and nothing can be loaded.
TEST_F(ClientCudaWaits, AttachingLoadsTheKernels) {
  EXPECT_EQ(cuda_.loaded(), (std::vector<std::string>{"epd::dispatch", "epd::combine", "epd::barrier"}));
  for (const std::string& kernel : cuda_.loaded()) EXPECT_TRUE(cuda_.prefers_shared_memory(kernel)) << kernel;
  EXPECT_EQ(cuda_.enqueued_anywhere(), 1u) << "the join writes the epoch";
}

TEST_F(ClientCudaWaits, WithoutKernelsNothingWaitsByThem) {
  for (const char* step : {"cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "epd::dispatch",
                           "epd::combine", "epd::barrier"}) {
    SCOPED_TRACE(step);
    cuda_.fail(step, CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_INTERNAL);
    EXPECT_ERROR_HAS("waiting by kernel: loading libepd's kernels: CUDA_ERROR_LAUNCH_FAILED");
    ASSERT_EQ(attach_again(EPD_WAIT_BY_MEMOP), EPD_OK) << epd_last_error();
    cuda_.fail(step, CUDA_SUCCESS);
  }
  cuda_.fail("cuLibraryLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_UNSUPPORTED);
  EXPECT_ERROR_HAS("no kernels for this GPU; allowed: EPD_WAIT_BY_MEMOP");
}

TEST_F(ClientCudaWaits, OtherValuesAreRefused) {
  const std::size_t before = cuda_.enqueued_anywhere();
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
  EXPECT_EQ(cuda_.enqueued_anywhere(), before);
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
    EXPECT_EQ(last_kernel(stream_), deferred ? "epd::dispatch" : "none") << "the call itself";
    ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_kernel(other_), "none");
    finish(ticket);
  }
}

TEST_F(ClientCudaWaits, AKernelThatCanNotBeLaunched) {
  ASSERT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_OK) << epd_last_error();
  epd_ticket_t ticket = 0;
  cuda_.fail("cuStreamIsCapturing", CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_INTERNAL);
  EXPECT_ERROR_HAS("cuStreamIsCapturing: CUDA_ERROR_INVALID_HANDLE");
  cuda_.fail("cuStreamIsCapturing", CUDA_SUCCESS);
  cuda_.fail("epd::dispatch", CUDA_ERROR_LAUNCH_FAILED);
  for (const bool deferred : {false, true}) {
    EXPECT_EQ(dispatch(0, stream_, &ticket, deferred), EPD_INTERNAL);
    EXPECT_ERROR_HAS("epd::dispatch: CUDA_ERROR_LAUNCH_FAILED");
  }
  EXPECT_EQ(ticket, 0u);
  EXPECT_EQ(words().tail, 0u);
}

// ---- whoever dies, nobody is in the library -------------------------------------------------------

TEST_P(ClientCuda, AnEvictionReleasesTheStreams) {
  epd_ticket_t first = 0;
  epd_ticket_t second = 0;
  ASSERT_EQ(dispatch(0, stream_, &first), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch(1, other_, &second, true), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, second, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(waits_in(other_), 1u);
  daemon_.end_session(StatusCode::kPermissionDenied, "the operator said so");
  daemon_.hang_up();
  EXPECT_TRUE(cuda_.await_idle(stream_));
  EXPECT_TRUE(cuda_.await_idle(other_));
  EXPECT_EQ(wait(first), EPD_PERMISSION_DENIED);
  EXPECT_EQ(wait(second), EPD_PERMISSION_DENIED);
}

}  // namespace
}  // namespace epd::testing
