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
  if (lands(op)) return run_landing_dispatch(op, memory);
  open_routing(op);
  __syncthreads();
  run_pushing_dispatch(op, cta, memory);
}

// One CTA's part of a combine. `op` is the CTA's own copy.
template <bool kPerExpert>
__device__ inline void run_combine(const Operation& op, Cta cta, std::uint8_t* memory) {
  if (kPerExpert && lands(op)) {
    run_landing_combine(op, memory);
  } else {
    run_pulling_combine<kPerExpert>(op, cta, memory);
  }
}

}  // namespace epd::kernels::cuda
