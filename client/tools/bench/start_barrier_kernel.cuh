// A start barrier at which the streams of several devices wait until all go on together.
#pragma once

#include "bench/barrier_lines.h"
#include "cuda/common/ptx.cuh"

#include <cstdint>

namespace epd::gpu_test {

// Opens when the host has said so, and all devices have come here as often as this one; gives up after
// kGateNs. One warp, a lane for each device.
extern "C" __global__ void start_barrier_kernel(BarrierLines lines, std::uint32_t device,
                                                const std::uint64_t* opened) {
  using namespace kernels::cuda;
  const std::uint64_t end = nanoseconds() + kGateNs;
  std::uint64_t* const own = lines.at[device];
  const std::uint64_t times = load_relaxed_system(own + device) + 1;
  while (load_relaxed_system(opened) < times && nanoseconds() < end) {
  }
  __syncwarp();
  if (threadIdx.x >= lines.count) return;
  store_release_system(lines.at[threadIdx.x] + device, times);
  while (load_acquire_system(own + threadIdx.x) < times && nanoseconds() < end) {
  }
}

}  // namespace epd::gpu_test
