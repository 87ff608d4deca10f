// Chooses the algorithm of an operation. A group has inboxes if it sends few tokens in a per-expert layout.
// Its operations take the low-latency path. All other operations take the high-throughput path.
#pragma once

#include "cuda/high_throughput/dispatch.cuh"
#include "cuda/low_latency/inbox_dispatch.cuh"

#include "cuda/high_throughput/combine.cuh"
#include "cuda/low_latency/inbox_combine.cuh"

namespace epd::kernels::cuda {

// Runs one CTA's part of a dispatch. `op` is the CTA's own copy in shared memory.
__device__ inline void run_dispatch(Operation& op, Cta cta, std::uint8_t* memory) {
  if (is_low_latency(op)) return run_low_latency_dispatch(op, memory);
  if (threadIdx.x == 0) invalidate_record(op);  // in each CTA, before its next barrier
  __syncthreads();
  run_high_throughput_dispatch(op, cta, memory);
}

// Runs one CTA's part of a combine. `op` is the CTA's own copy in shared memory.
template <bool kPerExpert>
__device__ inline void run_combine(Operation& op, Cta cta, std::uint8_t* memory) {
  if (kPerExpert && is_low_latency(op)) {
    run_low_latency_combine(op, memory);
  } else {
    run_high_throughput_combine<kPerExpert>(op, cta, memory);
  }
}

}  // namespace epd::kernels::cuda
