// Graphs of one stream on the fake driver: what was captured runs at each launch, with its parameters as they
// were, on whatever stream.
#include "unit/fake_cuda/fake_cuda_world.h"

#include "step.h"

#include <array>
#include <chrono>
#include <functional>
#include <thread>

namespace epd::fake_cuda_test {
namespace {

class FakeCudaGraph : public ::testing::Test {
 protected:
  void SetUp() override {
    EPD_CU(cuCtxSetCurrent(primary_context(0)));
    EPD_CU(cuMemAlloc(&memory_, 4096));
    EPD_CU(cuMemsetD8(memory_, 0, 4096));
    EPD_CU(cuMemAlloc(&words_, sizeof(abi::CallWords)));
    EPD_CU(cuMemsetD8(words_, 0, sizeof(abi::CallWords)));
    EPD_CU(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
    EPD_CU(cuStreamCreate(&other_, CU_STREAM_NON_BLOCKING));
  }
  void TearDown() override {
    cuStreamDestroy(stream_);
    cuStreamDestroy(other_);
    cuMemFree(memory_);
    cuMemFree(words_);
    EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
    cuCtxSetCurrent(nullptr);
  }
  CUstreamCaptureStatus status() {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    EPD_CU(cuStreamIsCapturing(stream_, &status));
    return status;
  }
  std::uint32_t at(std::size_t word) const {
    return reinterpret_cast<volatile std::uint32_t*>(memory_)[word];
  }

  CUdeviceptr memory_ = 0;
  CUdeviceptr words_ = 0;  // abi::CallWords
  CUstream stream_ = nullptr;
  CUstream other_ = nullptr;
};

TEST_F(FakeCudaGraph, WhatWasCapturedRunsAtEachLaunch) {
  CUlibrary library = nullptr;
  CUkernel signal = nullptr;
  EPD_CU(cuLibraryLoadData(&library, "any", nullptr, nullptr, 0, nullptr, nullptr, 0));
  EPD_CU(cuLibraryGetKernel(&signal, library, stream_kernels::kKernelNames[0]));
  EPD_CU(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  EXPECT_EQ(status(), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_EQ(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_ILLEGAL_STATE);
  stream_kernels::Step step;
  step.calls = true;
  step.words = reinterpret_cast<abi::CallWords*>(words_);
  void* parameters[] = {&step};
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(signal), 1, 1, 1, 1, 1, 1, 0, stream_, parameters,
                        nullptr));
  step.words = nullptr;  // parameters are those of the capture
  EPD_CU(cuStreamWaitValue32(stream_, memory_ + 4, 1, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuMemcpyDtoDAsync(memory_ + 8, words_ + offsetof(abi::CallWords, tail), 4, stream_));
  EPD_CU(cuStreamWriteValue32(stream_, memory_ + 4, 0, 0));
  CUgraph graph = nullptr;
  EPD_CU(cuStreamEndCapture(stream_, &graph));
  EXPECT_EQ(status(), CU_STREAM_CAPTURE_STATUS_NONE);
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(reinterpret_cast<abi::CallWords*>(words_)->tail, 0u) << "nothing runs while it is captured";

  CUgraphExec executable = nullptr;
  EPD_CU(cuGraphInstantiate(&executable, graph, 0));
  EPD_CU(cuGraphDestroy(graph));
  EPD_CU(cuStreamDestroy(stream_));  // the graph needs it no more
  EPD_CU(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
  for (unsigned i = 1; i <= 3; ++i) {
    EPD_CU(cuMemsetD32(memory_, 0, 4));
    EPD_CU(cuGraphLaunch(executable, other_));
    EXPECT_EQ(cuStreamQuery(other_), CUDA_ERROR_NOT_READY);
    EPD_CU(cuStreamWriteValue32(stream_, memory_ + 4, 1, 0));
    EPD_CU(cuStreamSynchronize(other_));
    EXPECT_EQ(at(2), i);
    EXPECT_EQ(at(1), 0u);
  }
  EPD_CU(cuGraphExecDestroy(executable));
  EXPECT_EQ(cuGraphLaunch(executable, other_), CUDA_ERROR_INVALID_VALUE);
  cuLibraryUnload(library);
}

// Others only say where a capture forks or joins, and have no time.
TEST_F(FakeCudaGraph, ExternalEventsAreRecordedByEachLaunch) {
  std::array<CUevent, 2> events{};
  for (CUevent& event : events) EPD_CU(cuEventCreate(&event, CU_EVENT_DEFAULT));
  EXPECT_EQ(cuEventRecordWithFlags(events[0], stream_, CU_EVENT_RECORD_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
  EPD_CU(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  EPD_CU(cuEventRecordWithFlags(events[0], stream_, CU_EVENT_RECORD_EXTERNAL));
  EPD_CU(cuStreamWaitValue32(stream_, memory_, 1, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuStreamWriteValue32(stream_, memory_, 0, 0));
  EPD_CU(cuEventRecordWithFlags(events[1], stream_, CU_EVENT_RECORD_EXTERNAL));
  CUgraph graph = nullptr;
  EPD_CU(cuStreamEndCapture(stream_, &graph));
  float ms = 0;
  EXPECT_EQ(cuEventElapsedTime(&ms, events[0], events[1]), CUDA_ERROR_INVALID_HANDLE) << "never recorded";
  CUgraphExec executable = nullptr;
  EPD_CU(cuGraphInstantiate(&executable, graph, 0));
  EPD_CU(cuGraphDestroy(graph));
  for (const int wait_ms : {20, 5}) {
    EPD_CU(cuGraphLaunch(executable, other_));
    std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
    EPD_CU(cuStreamWriteValue32(stream_, memory_, 1, 0));
    EPD_CU(cuStreamSynchronize(other_));
    const float before = ms;
    EPD_CU(cuEventElapsedTime(&ms, events[0], events[1]));
    EXPECT_GT(ms, 0);
    EXPECT_NE(ms, before) << "of another launch";
  }
  EPD_CU(cuGraphExecDestroy(executable));
  for (CUevent event : events) EPD_CU(cuEventDestroy(event));
}

TEST_F(FakeCudaGraph, WhatWaitsOrIsNotLinearSpoilsTheCapture) {
  std::uint32_t host = 0;
  CUevent event = nullptr;
  EPD_CU(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  EXPECT_EQ(cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  const std::function<CUresult()> calls[] = {
      [&] { return cuStreamSynchronize(stream_); },
      [&] { return cuStreamQuery(stream_); },
      [&] { return cuEventRecord(event, stream_); },
      [&] { return cuStreamWaitEvent(stream_, event, 0); },
      [&] { return cuMemcpyDtoHAsync(&host, memory_, 4, stream_); },
  };
  for (const auto& call : calls) {
    EPD_CU(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT_EQ(call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_EQ(status(), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    CUgraph graph = nullptr;
    EXPECT_EQ(cuStreamEndCapture(stream_, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_EQ(graph, nullptr);
  }
  EXPECT_EQ(cuStreamEndCapture(stream_, nullptr), CUDA_ERROR_INVALID_VALUE);
  EPD_CU(cuEventDestroy(event));
}

TEST_F(FakeCudaGraph, OtherStreamsMayNotBeSynchronisedBesideACaptureOfTheGlobalMode) {
  CUstream other = nullptr;
  EPD_CU(cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0));
  const auto end = [&] {
    CUgraph graph = nullptr;
    const CUresult result = cuStreamEndCapture(stream_, &graph);
    if (graph != nullptr) {
      EPD_CU(cuGraphDestroy(graph));
    }
    return result;
  };
  const auto synchronise_as = [&](CUstreamCaptureMode mode) {
    CUstreamCaptureMode before = mode;
    EPD_CU(cuThreadExchangeStreamCaptureMode(&before));
    const CUresult result = cuStreamSynchronize(other);
    EPD_CU(cuThreadExchangeStreamCaptureMode(&before));
    EXPECT_EQ(before, mode);
    return result;
  };
  EPD_CU(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT_EQ(synchronise_as(CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  EXPECT_EQ(synchronise_as(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
  EXPECT_EQ(end(), CUDA_SUCCESS);
  EPD_CU(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT_EQ(synchronise_as(CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(end(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EPD_CU(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  EXPECT_EQ(synchronise_as(CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  EXPECT_EQ(end(), CUDA_SUCCESS);
  EPD_CU(cuStreamDestroy(other));
}

}  // namespace
}  // namespace epd::fake_cuda_test
