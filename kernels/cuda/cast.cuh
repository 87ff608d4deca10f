// The FP8 block cast of one row in shared memory, in place, by one warp.
#pragma once

#include "cuda/ptx.cuh"
#include "kernels/operations.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace epd::kernels::cuda {

inline constexpr float kMinAmax = 1e-30f;

struct BlockScale {
  float scale;
  float inverse;
};

// host/row_kernels.h has the reasons. Divisions are IEEE's; nothing here may be contracted or approximated.
__device__ inline BlockScale block_scale(float amax, bool pow2) {
  if (!pow2) return {__fdiv_rn(amax, 448.0f), __fdiv_rn(448.0f, amax)};
  const std::uint32_t exponent = (__float_as_uint(__fdiv_rn(amax, 448.0f)) + 0x7fffffu) >> 23;
  return {__uint_as_float(exponent << 23), exponent == 255 ? 0.0f : __uint_as_float((254 - exponent) << 23)};
}

// Two float32 to two e4m3 codes, nearest even, saturating; NaN gives 0x7f. From sm_89 on that is what the
// instruction does; before, CUDA's header does it in integers, and gives the same codes but for NaN's sign.
__device__ inline std::uint32_t to_e4m3x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  const auto code = [](float value) -> std::uint32_t {
    if (value != value) return 0x7f;
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  };
  return code(low) | code(high) << 8;
#endif
}

__device__ inline float low_float(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_float(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// The larger magnitudes of two pairs; a NaN loses against anything else.
__device__ inline std::uint32_t max_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// amax of the block of which each of 16 lanes holds 8 values.
__device__ inline float block_amax(uint4 v) {
  constexpr std::uint32_t kMagnitudes = 0x7fff7fffu;
  std::uint32_t m = max_pair(max_pair(v.x & kMagnitudes, v.y & kMagnitudes),
                             max_pair(v.z & kMagnitudes, v.w & kMagnitudes));
#pragma unroll
  for (int step = 8; step > 0; step /= 2) m = max_pair(m, __shfl_xor_sync(kFull, m, step));
  return fmaxf(kMinAmax, fmaxf(low_float(m), high_float(m)));
}

__device__ inline uint2 cast_eight(uint4 v, float inverse) {
  const auto two = [inverse](std::uint32_t pair) {
    return to_e4m3x2(__fmul_rn(low_float(pair), inverse), __fmul_rn(high_float(pair), inverse));
  };
  return {two(v.x) | two(v.y) << 16, two(v.z) | two(v.w) << 16};
}

__device__ inline void put_scale(std::uint8_t* scales, ScaleFormat format, std::uint32_t block, float scale) {
  if (format == ScaleFormat::kUe8m0) {
    scales[block] = static_cast<std::uint8_t>(__float_as_uint(scale) >> 23);
  } else {
    reinterpret_cast<float*>(scales)[block] = scale;
  }
}

inline constexpr std::uint32_t kCastBatch = 4;  // vectors of a lane at once, so that their latencies overlap

// `row`: bf16 in, codes out over its first half. Vector i of 16 bytes becomes 8 bytes at i*8. A batch's codes
// lie below the next batch's values, and when a lane writes any, all lanes have read the batch: the shuffles
// need them all.
__device__ inline void cast_row(std::uint8_t* row, std::uint8_t* scales, const RowFormat& format) {
  const std::uint32_t vectors = format.hidden / 8;
  const bool pow2 = format.scales != ScaleFormat::kFloat32;
  for (std::uint32_t first = 0; first < vectors; first += 32 * kCastBatch) {
    uint4 v[kCastBatch];
    float amax[kCastBatch];
#pragma unroll
    for (std::uint32_t b = 0; b < kCastBatch; ++b) {
      const std::uint32_t i = first + b * 32 + lane_of();
      v[b] = i < vectors ? reinterpret_cast<const uint4*>(row)[i] : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (std::uint32_t b = 0; b < kCastBatch; ++b) amax[b] = block_amax(v[b]);
#pragma unroll
    for (std::uint32_t b = 0; b < kCastBatch; ++b) {
      const std::uint32_t i = first + b * 32 + lane_of();
      if (i >= vectors) continue;
      const BlockScale scale = block_scale(amax[b], pow2);
      reinterpret_cast<uint2*>(row)[i] = cast_eight(v[b], scale.inverse);
      if (lane_of() % 16 == 0) put_scale(scales, format.scales, i / 16, scale.scale);
    }
  }
  if (format.scales == ScaleFormat::kUe8m0) {
    for (std::uint32_t i = vectors / 16 + lane_of(); i < format.scale_bytes; i += 32) scales[i] = 0;
  }
}

}  // namespace epd::kernels::cuda
