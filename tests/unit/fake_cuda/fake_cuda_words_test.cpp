// The client library's kernels on the fake driver: a stream writes and awaits words by kernel, as by memory
// operation.
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
    EPD_CU(cuMemAlloc(&words_, 4096));
    EPD_CU(cuMemsetD8(words_, 0, 4096));
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
  static Step signal_step(CUdeviceptr word, std::uint32_t value) {
    Step step;
    step.begin = stream_kernels::Begin::kReady;
    step.ready = reinterpret_cast<std::uint32_t*>(word);
    step.value = value;
    return step;
  }
  CUresult signal(CUstream stream, CUdeviceptr word, std::uint32_t value) {
    return launch(stream, signal_step(word, value));
  }
  CUresult wait(CUstream stream, CUdeviceptr word, std::uint32_t value, std::uint64_t limit_ns = kLong_ns) {
    Step step;
    step.wait = stream_kernels::Wait::kDone;
    step.done = reinterpret_cast<const std::uint32_t*>(word);
    step.value = value;
    step.limit_ns = limit_ns;
    return launch(stream, step);
  }
  std::uint32_t at(CUdeviceptr word) const { return *reinterpret_cast<volatile std::uint32_t*>(word); }

  CUdeviceptr words_ = 0;
  CUstream stream_ = nullptr;
  CUstream other_ = nullptr;
  CUlibrary library_ = nullptr;
};

TEST_F(FakeCudaWords, AStreamWaitsForTheWordAndComparesCyclically) {
  const CUdeviceptr ready = words_;
  const CUdeviceptr done = words_ + 64;
  EPD_CU(cuStreamWriteValue32(other_, done, 0xffff'fff0u, 0));
  EPD_CU(cuStreamSynchronize(other_));
  // The answer is enqueued first, in another stream: it can only come when ready has been written.
  EPD_CU(wait(other_, ready, 5));
  EPD_CU(signal(other_, done, 7));
  Step both = signal_step(ready, 5);
  both.wait = stream_kernels::Wait::kDone;
  both.done = reinterpret_cast<const std::uint32_t*>(done);
  both.limit_ns = kLong_ns;
  EPD_CU(launch(stream_, both));
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(at(ready), 5u);
  EXPECT_EQ(at(done), 7u);
}

TEST_F(FakeCudaWords, AWaitWithoutAWordEndsAtItsLimitOrIsReleasedByAnyStore) {
  EPD_CU(wait(stream_, words_, 1, 1'000'000));
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(at(words_), 0u);
  EPD_CU(wait(stream_, words_, 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(cuStreamQuery(stream_), CUDA_ERROR_NOT_READY);
  EPD_CU(cuStreamWriteValue32(other_, words_, 1, 0));
  EPD_CU(cuStreamSynchronize(stream_));
}

TEST_F(FakeCudaWords, AnEmptyStepDoesNothingAndMoreThreadsAreRefused) {
  EPD_CU(launch(stream_, {}));
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(launch(stream_, signal_step(words_, 1), 2), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(FakeCudaWords, AWordThatIsNotTheDevicesFaults) {
  const auto faults = [this](const std::function<void()>& launches) {
    launches();
    EXPECT_EQ(cuStreamSynchronize(stream_), CUDA_ERROR_ILLEGAL_ADDRESS);
    TearDown();  // with a new context the device is as new
    SetUp();
  };
  alignas(64) static std::uint32_t of_the_host = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(&of_the_host);
  faults([&] { EPD_CU(signal(stream_, address, 1)); });
  EXPECT_EQ(of_the_host, 0u);
  faults([&] { EPD_CU(wait(stream_, address, 0)); });
  faults([&] { EPD_CU(signal(stream_, words_ + 2, 1)); });
  faults([&] {  // unmapped under the wait
    Arena arena(0, kUnit);
    EPD_CU(wait(stream_, reinterpret_cast<CUdeviceptr>(arena.take<char>(64)), 1));
  });
}

}  // namespace
}  // namespace epd::fake_cuda_test
