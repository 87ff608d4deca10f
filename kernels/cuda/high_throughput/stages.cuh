// The pieces of shared memory through which a warp copies rows.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/shared.cuh"

#include <cstddef>

namespace epd::kernels::cuda {

// The stages of one warp, and a barrier for each.
struct Stages {
  std::uint8_t* memory;
  std::uint64_t* barriers;
  std::uint32_t count;
  std::uint32_t bytes;

  __device__ Stages(const Operation& op, const Shared& shared)
      : memory(shared.stages + std::size_t{warp_of()} * op.division.stages * op.division.stage_bytes),
        barriers(shared.barriers + warp_of() * op.division.stages),
        count(op.division.stages),
        bytes(op.division.stage_bytes) {}
  __device__ std::uint8_t* at(std::uint32_t stage) const {
    EPD_BELOW(stage, count);
    return memory + std::size_t{stage} * bytes;
  }

  // open() comes before the first copy, close() after the last. Ordinary accesses have used the memory before
  // open(), so it fences them against the async proxy.
  __device__ void open(const Operation& op) const {
    EPD_AT_MOST(op.division.header_bytes + (warp_of() + 1) * count * bytes, op.division.shared_bytes);
    EPD_AT_MOST((warp_of() + 1) * count, num_barriers(op));
    if (lane_of() == 0) {
#pragma unroll 1
      for (std::uint32_t i = 0; i < count; ++i) barrier_init(barriers + i);
    }
    fence_async();
    __syncwarp();
  }
  __device__ void close() const {
    __syncwarp();
    if (lane_of() == 0) {
#pragma unroll 1
      for (std::uint32_t i = 0; i < count; ++i) barrier_invalidate(barriers + i);
    }
  }
};

// The current stage of a ring of stages, and the parity of its barrier's phase.
struct StageCursor {
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance(std::uint32_t count) {
    if (++stage != count) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace epd::kernels::cuda
