// Arguments of the kernel in start_barrier_kernel.cuh, for device and host code.
#pragma once

#include <cstdint>

namespace epd::gpu_test {

// Of each device, or the same for all: [devices], how often each device has come to the start barrier.
inline constexpr std::uint32_t kMaxBarrierDevices = 32;
inline constexpr std::uint32_t kBarrierThreads = 32;
inline constexpr std::uint64_t kGateNs = 20'000'000'000;  // then it gives up: streams go on, each by itself
struct BarrierLines {
  std::uint64_t* at[kMaxBarrierDevices];
  std::uint32_t count;
};

}  // namespace epd::gpu_test
