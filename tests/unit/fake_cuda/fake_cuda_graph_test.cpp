// The fake driver refuses in captures what the true one refuses.
#include "unit/fake_cuda/fake_cuda_fixture.h"

#include <functional>

namespace epd::fake_cuda_test {
namespace {

class FakeCudaGraph : public FakeCuda {
 protected:
  CUstreamCaptureStatus status() {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    EPD_CU(cuStreamIsCapturing(stream_, &status));
    return status;
  }
};

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
