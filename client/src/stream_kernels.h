// The library's kernels: stream_kernels.cu, loaded in a context. Included only where cuda.h exists.
#pragma once

#include "cuda_driver.h"
#include "device.h"
#include "step.h"

#include <array>

namespace epd::client {

class StreamKernels {
 public:
  explicit StreamKernels(const CudaDriver& driver) : driver_(driver) {}
  StreamKernels(const StreamKernels&) = delete;
  StreamKernels& operator=(const StreamKernels&) = delete;
  ~StreamKernels();

  // Once, in the current context, to which `stream` belongs. Waits for the stream. UNSUPPORTED: the library
  // has no kernels for this device.
  Status load(CUdevice device, CUstream stream);

  // Enqueues, in the current context, after load(). Legal in a stream that captures.
  CUresult launch(CUstream stream, abi::Op op, const stream_kernels::StagedStep& step) const;

 private:
  CUresult take(CUdevice device, std::uint32_t number);
  CUresult launch_nothing(CUstream stream, std::uint32_t number) const;
  // `step`: what the kernel takes.
  template <typename Step>
  CUresult launch(CUstream stream, std::uint32_t number, const Step& step) const;

  const CudaDriver& driver_;
  CUlibrary library_ = nullptr;
  std::array<CUkernel, stream_kernels::kNumKernels> kernels_{};
};

}  // namespace epd::client
