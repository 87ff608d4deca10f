// The start barrier, and what the links and the memory give: plain bulk stores and loads, from the same
// instructions that the kernels use.
#pragma once

#include "bench/kernel_arguments.h"
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

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Rows to all targets in turn.
extern "C" __global__ void __launch_bounds__(kProbeThreads, 1) push_probe(ProbeTargets targets) {
  using namespace kernels::cuda;
  extern __shared__ __align__(128) std::uint8_t memory[];
  std::uint8_t* const row = memory + warp_of() * kProbeRow;
  const std::uint32_t total = targets.rows_each * targets.count;
  for (std::uint32_t i = blockIdx.x * kProbeWarps + warp_of(); i < total; i += gridDim.x * kProbeWarps) {
    std::uint8_t* const to = targets.at[i % targets.count] + std::size_t{i / targets.count} * kProbeRow;
    warp_store(to, row, kProbeRow, lane_of() == 0);
    stores_commit();
    asm volatile("cp.async.bulk.wait_group.read 3;" ::: "memory");
  }
  stores_wait_done();
}

// The same by 16-byte stores of all lanes, from registers.
extern "C" __global__ void __launch_bounds__(kProbeThreads, 1) push_plain_probe(ProbeTargets targets) {
  using namespace kernels::cuda;
  const std::uint32_t total = targets.rows_each * targets.count;
  const uint4 value = {threadIdx.x, blockIdx.x, 3, 4};
  for (std::uint32_t i = blockIdx.x * kProbeWarps + warp_of(); i < total; i += gridDim.x * kProbeWarps) {
    auto* const to =
        reinterpret_cast<uint4*>(targets.at[i % targets.count] + std::size_t{i / targets.count} * kProbeRow);
#pragma unroll 4
    for (std::uint32_t v = lane_of(); v < kProbeRow / 16; v += 32) to[v] = value;
  }
}

// Rows from all targets in turn, `piece` bytes at a time.
extern "C" __global__ void __launch_bounds__(kProbeThreads, 1)
    pull_probe(ProbeTargets targets, std::uint32_t piece) {
  using namespace kernels::cuda;
  extern __shared__ __align__(128) std::uint8_t memory[];
  __shared__ std::uint64_t barriers[kProbeWarps];
  std::uint8_t* const row = memory + warp_of() * kProbeRow;
  std::uint64_t* const barrier = barriers + warp_of();
  if (lane_of() == 0) barrier_init(barrier);
  fence_async();
  __syncwarp();
  const std::uint32_t lanes = kProbeRow / piece;
  std::uint32_t parity = 0;
  const std::uint32_t total = targets.rows_each * targets.count;
  for (std::uint32_t i = blockIdx.x * kProbeWarps + warp_of(); i < total; i += gridDim.x * kProbeWarps) {
    if (lane_of() == 0) barrier_expect(barrier, lanes * piece);
    __syncwarp();
    // Each lane's piece from another target: as combine pulls.
    const std::uint8_t* const from = targets.at[(i + lane_of()) % targets.count] +
                                     std::size_t{i / targets.count} * kProbeRow + lane_of() * piece;
    warp_load(row + lane_of() * piece, from, piece, lane_of() < lanes, barrier);
    barrier_wait(barrier, parity);
    parity ^= 1;
    __syncwarp();
  }
}

#endif

}  // namespace epd::gpu_test
