// The image of the kernels, loaded and launched through the driver as the daemon does it.
#pragma once

#include "kernels/cuda.h"
#include "kernels/workers.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace epd::gpu_test {

// Checks calls of the runtime and of the driver: their numbers are the same.
#define EPD_CUDA(call)                                                                                \
  do {                                                                                                \
    const cudaError_t error_ = static_cast<cudaError_t>(call);                                        \
    if (error_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (0)

// One for the process, loaded at first use and never unloaded.
class Image {
 public:
  static Image& get() {
    static Image image;
    return image;
  }

  // Before the first launch on the device: its kernels get there now and not when another one waits for them.
  void prepare(int device) {
    EPD_CUDA(cudaSetDevice(device));
    CUdevice handle = 0;
    EPD_CUDA(cuDeviceGet(&handle, device));
    int bytes = 0;
    EPD_CUDA(cuDeviceGetAttribute(&bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, handle));
    for (const CUkernel kernel : kernels_) {
      CUfunction loaded = nullptr;
      EPD_CUDA(cuKernelGetFunction(&loaded, kernel));
      EPD_CUDA(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                    bytes - static_cast<int>(kernels::cuda::kStaticBytes), kernel, handle));
    }
  }

  // A gate and the main kernel after it, on the current device.
  void launch_pair(kernels::WorkerArguments own, std::uint32_t shared_bytes, CUstream stream) const {
    void* arguments[] = {&own};
    EPD_CUDA(cuLaunchKernel(reinterpret_cast<CUfunction>(find(kernels::cuda::kGateKernel)), 1, 1, 1,
                            kernels::cuda::kGateThreads, 1, 1, 0, stream, arguments, nullptr));
    CUlaunchAttribute early{};
    early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    early.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = own.ctas;
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = kernels::kMaxThreads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared_bytes;
    config.hStream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    EPD_CUDA(cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(find(kernels::cuda::kMainKernel)),
                              arguments, nullptr));
  }

 private:
  Image() {
    EPD_CUDA(cuInit(0));
    CUlibrary library = nullptr;
    EPD_CUDA(
        cuLibraryLoadData(&library, kernels::cuda::image().data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    for (std::size_t i = 0; i < std::size(kernels_); ++i) {
      EPD_CUDA(cuLibraryGetKernel(&kernels_[i], library, kernels::cuda::kKernelNames[i]));
    }
  }

  CUkernel find(const char* name) const {
    for (std::size_t i = 0; i < std::size(kernels_); ++i) {
      if (std::strcmp(name, kernels::cuda::kKernelNames[i]) == 0) return kernels_[i];
    }
    std::fprintf(stderr, "no kernel %s\n", name);
    std::exit(1);
  }

  CUkernel kernels_[std::size(kernels::cuda::kKernelNames)] = {};
};

}  // namespace epd::gpu_test
