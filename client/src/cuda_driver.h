// The functions of CUDA's driver that the library calls, found at run time. The library does not link
// libcuda. Included only where cuda.h exists, see CMakeLists.txt.
#pragma once

#include "errors.h"

#include <cuda.h>

namespace epd::client {

// In cuda.h many of these names are macros for the version that the header describes (cuDeviceGetUuid_v2).
// Both the member's name and the symbol's go through the expansion, so that type and symbol fit together.
#define EPD_CUDA_FUNCTIONS(X)               \
  X(cuInit)                                 \
  X(cuGetErrorName)                         \
  X(cuDeviceGetCount)                       \
  X(cuDeviceGet)                            \
  X(cuDeviceGetUuid)                        \
  X(cuDevicePrimaryCtxRetain)               \
  X(cuDevicePrimaryCtxRelease)              \
  X(cuCtxGetCurrent)                        \
  X(cuCtxGetDevice)                         \
  X(cuCtxPushCurrent)                       \
  X(cuCtxPopCurrent)                        \
  X(cuCtxSynchronize)                       \
  X(cuCtxGetStreamPriorityRange)            \
  X(cuMemGetAllocationGranularity)          \
  X(cuMemCreate)                            \
  X(cuMemExportToShareableHandle)           \
  X(cuMemRetainAllocationHandle)            \
  X(cuMemGetAllocationPropertiesFromHandle) \
  X(cuPointerGetAttributes)                 \
  X(cuIpcGetMemHandle)                      \
  X(cuMemImportFromShareableHandle)         \
  X(cuMemRelease)                           \
  X(cuMemAddressReserve)                    \
  X(cuMemAddressFree)                       \
  X(cuMemMap)                               \
  X(cuMemUnmap)                             \
  X(cuMemSetAccess)                         \
  X(cuStreamCreateWithPriority)             \
  X(cuStreamDestroy)                        \
  X(cuStreamSynchronize)                    \
  X(cuStreamIsCapturing)                    \
  X(cuStreamGetCaptureInfo)                 \
  X(cuUserObjectCreate)                     \
  X(cuUserObjectRelease)                    \
  X(cuGraphRetainUserObject)                \
  X(cuThreadExchangeStreamCaptureMode)      \
  X(cuStreamWriteValue32)                   \
  X(cuStreamWaitValue32)                    \
  X(cuStreamWaitEvent)                      \
  X(cuEventCreate)                          \
  X(cuEventDestroy)                         \
  X(cuEventRecord)                          \
  X(cuMemcpyDtoHAsync)                      \
  X(cuMemcpyHtoDAsync)                      \
  X(cuLibraryLoadData)                      \
  X(cuLibraryUnload)                        \
  X(cuLibraryGetKernel)                     \
  X(cuKernelSetAttribute)                   \
  X(cuLaunchKernel)

struct CudaDriver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): the name of a member
#define EPD_CUDA_MEMBER(function) decltype(&::function) function = nullptr;
  EPD_CUDA_FUNCTIONS(EPD_CUDA_MEMBER)
#undef EPD_CUDA_MEMBER
};

// Opens libcuda.so.1, once in the process; it is never closed. UNSUPPORTED: there is none, or it is too old.
Status load_cuda_driver(const CudaDriver*& driver);

// "CUDA_ERROR_INVALID_VALUE"
std::string error_name(const CudaDriver& driver, CUresult error);
// "<what>: <error name>": RESOURCE_EXHAUSTED if memory ran out, else INTERNAL; OK if there is no error.
Status cuda_status(const CudaDriver& driver, CUresult error, const std::string& what);

}  // namespace epd::client
