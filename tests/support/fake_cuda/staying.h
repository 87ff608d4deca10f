// Beside the driver's ABI: which SMs are taken, for tests of who has how many.
#pragma once

namespace epd::fake_cuda {

// A kernel that holds an SM for each of its CTAs that works: each that asks for SMs (KernelDevice::take_sms),
// as a main kernel does for its operation. Nothing else that asks fits beside one.
struct StayingKernel {
  unsigned ctas = 0;
  unsigned threads = 0;
  unsigned shared_bytes = 0;  // dynamic
  bool operator==(const StayingKernel&) const = default;
};

}  // namespace epd::fake_cuda

// Those of this process that hold SMs of a device: how many, and the first `most` of them. Found by dlsym.
extern "C" __attribute__((visibility("default"))) unsigned cuFakeStayingKernels(
    int device, epd::fake_cuda::StayingKernel* kernels, unsigned most);
