// The client library's kernels on the fake driver: a stream makes calls and waits for them.
#include "unit/fake_cuda/fake_cuda_world.h"

#include "step.h"

#include <chrono>
#include <functional>
#include <thread>

namespace epd::fake_cuda_test {
namespace {

using stream_kernels::Step;

constexpr std::uint64_t kLong_ns = 60'000'000'000;

class FakeCudaWords : public ::testing::Test {
 protected:
  void SetUp() override {
    EPD_CU(cuCtxSetCurrent(primary_context(0)));
    EPD_CU(cuMemAlloc(&words_, sizeof(abi::CallWords)));
    EPD_CU(cuMemsetD8(words_, 0, sizeof(abi::CallWords)));
    EPD_CU(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
    EPD_CU(cuStreamCreate(&other_, CU_STREAM_NON_BLOCKING));
    EPD_CU(cuLibraryLoadData(&library_, "any", nullptr, nullptr, 0, nullptr, nullptr, 0));
  }
  void TearDown() override {
    cuLibraryUnload(library_);
    cuStreamDestroy(stream_);
    cuStreamDestroy(other_);
    cuMemFree(words_);
    EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
    cuCtxSetCurrent(nullptr);
  }
  CUresult launch(CUstream stream, Step step, unsigned threads = 1) {
    CUkernel kernel = nullptr;
    EPD_CU(cuLibraryGetKernel(&kernel, library_, stream_kernels::kKernelNames[0]));
    void* parameters[] = {&step};
    return cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, threads, 1, 1, 0, stream, parameters,
                          nullptr);
  }
  // Makes a call on slot 0, and waits for its end.
  static Step call_step(CUdeviceptr words, std::uint64_t limit_ns = kLong_ns) {
    Step step;
    step.calls = true;
    step.wait = stream_kernels::Wait::kCall;
    step.words = reinterpret_cast<abi::CallWords*>(words);
    step.limit_ns = limit_ns;
    return step;
  }
  abi::CallWords& words() const { return *reinterpret_cast<abi::CallWords*>(words_); }
  CUdeviceptr done() const { return words_ + offsetof(abi::CallWords, done); }

  CUdeviceptr words_ = 0;
  CUstream stream_ = nullptr;
  CUstream other_ = nullptr;
  CUlibrary library_ = nullptr;
};

TEST_F(FakeCudaWords, AStreamWaitsForItsCallAndComparesCyclically) {
  words().tail = words().done = 0xffff'ffff;
  EPD_CU(launch(stream_, call_step(words_)));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(cuStreamQuery(stream_), CUDA_ERROR_NOT_READY);
  EPD_CU(cuStreamWriteValue32(other_, done(), 0, 0));
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(words().tail, 0u);
  EXPECT_EQ(words().bell[0], 1u);
}

TEST_F(FakeCudaWords, AWaitWithoutAnEndEndsAtItsLimit) {
  EPD_CU(launch(stream_, call_step(words_, 1'000'000)));
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(words().done, 0u);
}

TEST_F(FakeCudaWords, AnEmptyStepDoesNothingAndMoreThreadsAreRefused) {
  EPD_CU(launch(stream_, {}));
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(launch(stream_, call_step(words_), 2), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(FakeCudaWords, AWordThatIsNotTheDevicesFaults) {
  const auto faults = [this](const std::function<void()>& launches) {
    launches();
    EXPECT_EQ(cuStreamSynchronize(stream_), CUDA_ERROR_ILLEGAL_ADDRESS);
    TearDown();  // with a new context the device is as new
    SetUp();
  };
  static abi::CallWords of_the_host;
  faults([&] { EPD_CU(launch(stream_, call_step(reinterpret_cast<CUdeviceptr>(&of_the_host)))); });
  EXPECT_EQ(of_the_host.tail, 0u);
  faults([&] {  // unmapped under the wait
    Arena arena(0, kUnit);
    EPD_CU(launch(stream_, call_step(reinterpret_cast<CUdeviceptr>(arena.take<abi::CallWords>(1)))));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  });
}

}  // namespace
}  // namespace epd::fake_cuda_test
