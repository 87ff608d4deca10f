// The CUDA driver, opened at its first use. So the same program starts on machines without a driver.
#pragma once

#include "common/status.h"

#include <cuda.h>
#include <cstdint>

// It takes the list for something else.
// clang-format off
#define EPD_CUDA_FUNCTIONS(X)                                                                               \
  X(cuInit)                                                                                                 \
  X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuDeviceGetCount) X(cuDeviceGet)            \
      X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceGetAttribute) X(cuDeviceCanAccessPeer) X(cuDevicePrimaryCtxRetain)             \
          X(cuCtxSetCurrent) X(cuCtxGetStreamPriorityRange) X(cuMemGetAllocationGranularity) X(cuMemCreate) \
              X(cuMemRelease) X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)             \
                  X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemGetAllocationPropertiesFromHandle)    \
                      X(cuMemAlloc) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemcpyHtoDAsync)                 \
                          X(cuMemcpyDtoHAsync) X(cuMemcpy2DAsync) X(cuMemsetD8Async) X(cuStreamCreate) X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamQuery)       \
                              X(cuStreamSynchronize) X(cuStreamWaitValue32) X(cuStreamWaitValue64) X(cuStreamWriteValue32)         \
                                  X(cuLibraryLoadData) X(cuLibraryGetKernel)        \
                                      X(cuKernelSetAttribute) X(cuLaunchKernel) X(cuLaunchKernelEx) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventSynchronize)   \
                                          X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle) X(cuPointerGetAttributes) X(cuStreamWriteValue64)
// clang-format on

namespace epd::device {

struct CudaDriver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): the name of a member
#define EPD_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  EPD_CUDA_FUNCTIONS(EPD_CUDA_MEMBER)
#undef EPD_CUDA_MEMBER

  // WOULD_BLOCK while MPS recovers from a fault and accepts no process, else `otherwise`.
  Status refused(StatusCode otherwise, const std::string& where, const char* what, CUresult result) const;
  // "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
  std::string describe(const char* what, CUresult result) const;
};

// Loaded and initialised; UNSUPPORTED if there is no driver, no GPU, or the driver is too old.
Result<const CudaDriver*> cuda_driver();
// 0: the machine has no driver, or no GPU. UNSUPPORTED: its driver can't be used now.
Result<std::uint32_t> num_cuda_devices();

}  // namespace epd::device
