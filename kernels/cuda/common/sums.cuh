// Sums of BF16 columns in float32, eight columns at a time, and their rounding.
#pragma once

#include "cuda/common/bf16.cuh"

namespace epd::kernels::cuda {

// Rounds two float32 to BF16, to nearest even. The instruction gives 0x7fff for NaN, where the specification
// asks for 0x7fc0.
__device__ inline std::uint32_t to_bf16x2(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Returns a mark in the top bit of each half that is 0x7fff. No rounded number is 0x7fff, so a mark is a NaN.
__device__ inline std::uint32_t nan_marks(std::uint32_t pair) {
  return (pair + 0x00010001u) & ~pair & 0x80008000u;
}
// Replaces the instruction's NaN 0x7fff by 0x7fc0 in both halves.
__device__ inline std::uint32_t with_canonical_nan(std::uint32_t pair) {
  if ((pair & 0xffffu) == 0x7fffu) pair ^= 0x7fffu ^ 0x7fc0u;
  if (pair >> 16 == 0x7fffu) pair ^= (0x7fffu ^ 0x7fc0u) << 16;
  return pair;
}

__device__ inline uint4 with_canonical_nans(uint4 v) {
  if ((nan_marks(v.x) | nan_marks(v.y) | nan_marks(v.z) | nan_marks(v.w)) == 0) return v;
  return {with_canonical_nan(v.x), with_canonical_nan(v.y), with_canonical_nan(v.z), with_canonical_nan(v.w)};
}

// Sums of eight columns.
struct Eight {
  float v[8];
  __device__ void clear() {
#pragma unroll
    for (float& x : v) x = 0.0f;
  }
  __device__ void add(uint4 row, float weight) {
    const std::uint32_t pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __fmaf_rn(weight, low_float(pairs[i]), v[2 * i]);
      v[2 * i + 1] = __fmaf_rn(weight, high_float(pairs[i]), v[2 * i + 1]);
    }
  }
  __device__ uint4 rounded() const {
    return {to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]), to_bf16x2(v[4], v[5]), to_bf16x2(v[6], v[7])};
  }
};

}  // namespace epd::kernels::cuda
