// The kernels of one thread by which a stream may write and await words: stream_kernels.cu, in a context.
// Included only where cuda.h is.
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

  // Once, in the context that is current and that `stream` is of; waits for the stream. UNSUPPORTED: the
  // library has none for this device, or none at all.
  Status load(CUdevice device, CUstream stream);

  // Enqueue, in the context that is current; after load(). Legal in a stream that captures.
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
