// The one-thread kernels by which a stream writes words and waits for them: stream_kernels.cu, loaded in a
// context. Included only where cuda.h exists.
#pragma once

#include "cuda_driver.h"
#include "device.h"

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

  // These enqueue, in the current context, after load(). Legal in a stream that captures.
  CUresult signal(CUstream stream, std::uintptr_t ready, std::uint32_t value) const;
  CUresult wait(CUstream stream, const StreamWait& wait) const;
  CUresult signal_and_wait(CUstream stream, std::uintptr_t ready, const StreamWait& wait) const;
  CUresult call(CUstream stream, const StreamCall& call) const;
  CUresult await_call(CUstream stream, std::uintptr_t words, std::uint32_t slot,
                      std::uint64_t limit_ns) const;

 private:
  CUresult take(CUdevice device, const char* name, CUkernel& kernel);
  CUresult launch(CUkernel kernel, CUstream stream, void** parameters) const;

  const CudaDriver& driver_;
  CUlibrary library_ = nullptr;
  CUkernel signal_ = nullptr;
  CUkernel wait_ = nullptr;
  CUkernel signal_and_wait_ = nullptr;
  CUkernel command_ = nullptr;
  CUkernel await_call_ = nullptr;
};

}  // namespace epd::client
