// The entry points: one launch is one operation. Device code only; their names are kKernelNames.
#include "cuda/expand.cuh"
#include "cuda/partial_sums.cuh"

namespace epd::kernels::cuda {

extern __shared__ __align__(128) std::uint8_t dynamic_memory[];

// The CTA's own copy of the operation. All threads call.
__device__ inline const Operation& fetch(const Operation* from) {
  static_assert(sizeof(Operation) % 16 == 0);
  static_assert(sizeof(Operation) + 512 + 1024 <= kStaticBytes);
  __shared__ alignas(16) std::uint8_t copy[sizeof(Operation)];
  const auto* const source = reinterpret_cast<const uint4*>(from);
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(copy)[i] = __ldcg(source + i);
  }
  __syncthreads();
  return *reinterpret_cast<const Operation*>(copy);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) epd_dispatch(const Operation* op) {
  run_dispatch(fetch(op), {blockIdx.x, gridDim.x}, dynamic_memory);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) epd_combine(const Operation* op) {
  run_combine<false>(fetch(op), {blockIdx.x, gridDim.x}, dynamic_memory);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) epd_combine_per_expert(const Operation* op) {
  run_combine<true>(fetch(op), {blockIdx.x, gridDim.x}, dynamic_memory);
}

}  // namespace epd::kernels::cuda
