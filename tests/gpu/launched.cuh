// Kernels of one operation each, as main kernels run it: what kernels_bench times.
#pragma once

#include "cuda/algorithms.cuh"
#include "gpu/image.h"

namespace epd::gpu_test {

// `from`: the operation, in device memory. Each CTA runs its part of it.
template <kernels::Kind kKind, bool kPerExpert>
__global__ void __launch_bounds__(kernels::kMaxThreads, 1)
    launched_kernel(const kernels::cuda::Operation* from) {
  using namespace kernels::cuda;
  extern __shared__ __align__(128) std::uint8_t launched_memory[];
  __shared__ alignas(16) std::uint8_t copy[sizeof(Operation)];
  auto& op = *reinterpret_cast<Operation*>(copy);
  // Orders earlier accesses before the bulk copies that the signal warp issues first (OwnRows).
  if (warp_of() == signal_warp()) fence_async();
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(copy)[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
  __syncthreads();
  if constexpr (kKind == Kind::kDispatch) {
    run_dispatch(op, {blockIdx.x, gridDim.x}, launched_memory);
  } else {
    run_combine<kPerExpert>(op, {blockIdx.x, gridDim.x}, launched_memory);
  }
  leave(op, gridDim.x);
}

// On the current device. `on_device`: a copy of the configured `op` there.
inline void launch_operation(kernels::Kind kind, const kernels::cuda::Operation& op,
                             const kernels::cuda::Operation* on_device, cudaStream_t stream) {
  using kernels::Kind;
  auto* const kernel = kind == Kind::kDispatch ? launched_kernel<Kind::kDispatch, false>
                       : op.shape.per_expert   ? launched_kernel<Kind::kCombine, true>
                                               : launched_kernel<Kind::kCombine, false>;
  EPD_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(op.division.shared_bytes)));
  kernel<<<op.division.ctas, op.division.threads, op.division.shared_bytes, stream>>>(on_device);
  EPD_CUDA(cudaGetLastError());
}

}  // namespace epd::gpu_test
