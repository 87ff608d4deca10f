// A stream and a page of memory in the primary context of the fake driver's first device.
#pragma once

#include "unit/fake_cuda/fake_cuda_world.h"

namespace epd::fake_cuda_test {

template <typename T>
T& at(CUdeviceptr address) {
  return *reinterpret_cast<T*>(address);
}

// The primary context of device 0 is current; a page of its memory.
class FakeCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    context_ = primary_context(0);
    EPD_CU(cuCtxSetCurrent(context_));
    EPD_CU(cuMemAlloc(&memory_, 4096));
    EPD_CU(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
  }
  void TearDown() override {
    cuCtxSetCurrent(context_);
    cuStreamDestroy(stream_);
    EXPECT_EQ(cuMemFree(memory_), CUDA_SUCCESS);
    EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
    cuCtxSetCurrent(nullptr);
  }
  CUcontext context_ = nullptr;
  CUdeviceptr memory_ = 0;
  CUstream stream_ = nullptr;
};

}  // namespace epd::fake_cuda_test
