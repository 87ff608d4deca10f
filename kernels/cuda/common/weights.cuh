// Sums of a token's weights.
#pragma once

#include "cuda/common/ptx.cuh"

namespace epd::kernels::cuda {

// Returns the sum of the weights of all choices with the lane's `key`, in order of k from +0.0. NaN becomes
// 0x7fc00000. Lane k holds choice k; all lanes call.
__device__ inline float sum_weights(std::uint32_t topk, std::uint32_t key, float weight) {
  float sum = 0.0f;
#pragma unroll 1
  for (std::uint32_t k = 0; k < topk; ++k) {
    const std::uint32_t other = __shfl_sync(kFull, key, static_cast<int>(k));
    const float more = __shfl_sync(kFull, weight, static_cast<int>(k));
    if (other == key) sum = __fadd_rn(sum, more);
  }
  return sum == sum ? sum : __uint_as_float(0x7fc00000u);
}

}  // namespace epd::kernels::cuda
