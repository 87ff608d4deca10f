// The choice of algorithm. Groups of few tokens in per-expert layouts have inboxes: their operations take the
// low-latency path. All others take the high-throughput path.
#pragma once

#include "cuda/high_throughput/dispatch.cuh"
#include "cuda/low_latency/inbox_dispatch.cuh"

#include "cuda/high_throughput/combine.cuh"
#include "cuda/low_latency/inbox_combine.cuh"

namespace epd::kernels::cuda {

// One CTA's part of a dispatch. `op` is the CTA's own copy.
__device__ inline void run_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  if (is_low_latency(op)) return run_low_latency_dispatch(op, memory);
  invalidate_record(op);
  __syncthreads();
  run_high_throughput_dispatch(op, cta, memory);
}

// One CTA's part of a combine. `op` is the CTA's own copy.
template <bool kPerExpert>
__device__ inline void run_combine(const Operation& op, Cta cta, std::uint8_t* memory) {
  if (kPerExpert && is_low_latency(op)) {
    run_low_latency_combine(op, memory);
  } else {
    run_high_throughput_combine<kPerExpert>(op, cta, memory);
  }
}

}  // namespace epd::kernels::cuda
