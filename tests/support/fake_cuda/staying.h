// Beside the driver's ABI: which SMs are taken, for tests of who has how many.
#pragma once

namespace epd::fake_cuda {

// A resident kernel. It has an SM for each of its CTAs; nothing else fits beside one.
struct StayingKernel {
  unsigned ctas = 0;
  unsigned threads = 0;
  unsigned shared_bytes = 0;  // dynamic
  bool operator==(const StayingKernel&) const = default;
};

}  // namespace epd::fake_cuda

// Those that run on a device of this process: how many, and the first `most` of them. Found by dlsym.
extern "C" __attribute__((visibility("default"))) unsigned cuFakeStayingKernels(
    int device, epd::fake_cuda::StayingKernel* kernels, unsigned most);
