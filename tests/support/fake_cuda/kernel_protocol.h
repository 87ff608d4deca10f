// The kernels' work, done by a host: the same exchange between ranks, the same results to the last bit, the
// same endings. See kernels/cuda/common/signal.cuh, high_throughput/dispatch.cuh and combine.cuh, which this
// follows.
#pragma once

#include "kernels/cuda.h"
#include "kernels/workers.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace epd::fake_cuda {

// The device that a kernel runs on.
struct KernelDevice {
  // Whether the device reaches the bytes.
  std::function<bool(const void*, std::size_t)> reaches;
  // Whether the kernel is to leave without a word: its stream is gone, or the device has faulted.
  std::function<bool()> over;
  // Called between two polls of a wait; starts again for each wait.
  std::function<void(unsigned looks)> pause;
  // Once at most: waits until so many SMs are free, and holds them until the kernel ends. Each CTA that works
  // has a whole one. A kernel that only looks and leaves, as one warp does, needs none.
  std::function<void(unsigned ctas)> take_sms;
};

struct Launch {
  std::string kernel;  // one of kernels::cuda::kKernelNames
  unsigned ctas = 0;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
};

// Run a gate, and the main kernel after it, on the calling thread. Empty: it has ended, well or with a
// result that says how. Else what a device would have faulted at.
std::string run_gate(const kernels::WorkerArguments& own, const KernelDevice& device);
std::string run_main(const Launch& launch, const kernels::WorkerArguments& own, const KernelDevice& device);

}  // namespace epd::fake_cuda
