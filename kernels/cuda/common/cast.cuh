// The FP8 block cast of one row by one warp, from shared memory to shared memory.
#pragma once

#include "cuda/common/bf16.cuh"
#include "cuda/common/layout.h"
#include "cuda/common/ptx.cuh"
#include "kernels/rows.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace epd::kernels::cuda {

inline constexpr float kMinAmax = 1e-30f;

// The scale of one block, and the factor by which the block's elements are multiplied.
struct BlockScale {
  float scale;
  float inverse;
};

// Computes the scale of a block; host/row_kernels.h explains the formulas. The divisions follow IEEE. The
// compiler must neither contract nor approximate anything here.
__device__ inline BlockScale block_scale(float amax, bool pow2) {
  if (!pow2) return {__fdiv_rn(amax, 448.0f), __fdiv_rn(448.0f, amax)};
  const std::uint32_t exponent = (__float_as_uint(__fdiv_rn(amax, 448.0f)) + 0x7fffffu) >> 23;
  return {__uint_as_float(exponent << 23), exponent == 255 ? 0.0f : __uint_as_float((254 - exponent) << 23)};
}

// Rounds two float32 to two e4m3 codes: to nearest even, saturating; NaN becomes 0x7f. From sm_89 on, this is
// one instruction. Before sm_89, CUDA's header computes it in integers; the codes are the same except for the
// sign of NaN.
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

// Returns the larger magnitude of each half. If one number is NaN, the result is the other one.
__device__ inline std::uint32_t max_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Clears the signs of two pairs and returns the larger magnitude of each half.
__device__ inline std::uint32_t max_magnitudes(std::uint32_t a, std::uint32_t b) {
  constexpr std::uint32_t kMagnitudes = 0x7fff7fffu;
  return max_pair(a & kMagnitudes, b & kMagnitudes);
}
__device__ inline std::uint32_t max_magnitudes(uint4 v) {
  return max_pair(max_magnitudes(v.x, v.y), max_magnitudes(v.z, v.w));
}

// Casts eight BF16 numbers to eight codes.
__device__ inline uint2 cast_eight(uint4 v, float inverse) {
  const auto two = [inverse](std::uint32_t pair) {
    return to_e4m3x2(__fmul_rn(low_float(pair), inverse), __fmul_rn(high_float(pair), inverse));
  };
  return {two(v.x) | two(v.y) << 16, two(v.z) | two(v.w) << 16};
}

// Stores the scale of block `block` in the group's scale format.
__device__ inline void put_scale(std::uint8_t* scales, ScaleFormat format, std::uint32_t block, float scale) {
  if (format == ScaleFormat::kUe8m0) {
    scales[block] = static_cast<std::uint8_t>(__float_as_uint(scale) >> 23);
  } else {
    reinterpret_cast<float*>(scales)[block] = scale;
  }
}

// A section of a row: 4 * kSteps blocks of 128 numbers. Lane b divides for block b. In step j, eight lanes
// hold block 4 * j + lane / 8 as two vectors of 16 bytes each.
template <std::uint32_t kSteps>
struct CastSection {
  static constexpr std::uint32_t kBlocks = 4 * kSteps;
  uint4 v[kSteps][2];

  __device__ static std::uint32_t block(std::uint32_t step) { return 4 * step + lane_of() / 8; }

  // Loads the section. Blocks from number `blocks` on become zeros.
  __device__ void load(const uint4* row, std::uint32_t blocks) {
#pragma unroll
    for (std::uint32_t j = 0; j < kSteps; ++j) {
      const bool valid = block(j) < blocks;
      const uint4* const at = row + block(j) * 16 + lane_of() % 8;
      v[j][0] = valid ? at[0] : uint4{0, 0, 0, 0};
      v[j][1] = valid ? at[8] : uint4{0, 0, 0, 0};
    }
  }

  // Returns the largest magnitude of block `lane`.
  __device__ float amax() const {
    std::uint32_t own = 0;
#pragma unroll
    for (std::uint32_t j = 0; j < kSteps; ++j) {
      std::uint32_t m = max_pair(max_magnitudes(v[j][0]), max_magnitudes(v[j][1]));
#pragma unroll
      for (int step = 4; step > 0; step /= 2) m = max_pair(m, __shfl_xor_sync(kFull, m, step));
      const std::uint32_t theirs = __shfl_sync(kFull, m, static_cast<int>(lane_of() % 4 * 8));
      if (lane_of() / 4 == j) own = theirs;
    }
    return fmaxf(kMinAmax, fmaxf(low_float(own), high_float(own)));
  }

  // Stores codes and scales of the section's blocks. `first` is the section's first block in the row,
  // `blocks` the number of blocks in the row. The last section also zeroes the padding after UE8M0 scales.
  __device__ void cast(const RowFormat& format, std::uint8_t* codes, std::uint8_t* scales,
                       std::uint32_t first, std::uint32_t blocks) {
    const BlockScale scale = block_scale(amax(), format.scales != ScaleFormat::kFloat32);
    if (lane_of() < kBlocks && first + lane_of() < blocks)
      put_scale(scales, format.scales, first + lane_of(), scale.scale);
#pragma unroll
    for (std::uint32_t j = 0; j < kSteps; ++j) {
      const float factor = __shfl_sync(kFull, scale.inverse, static_cast<int>(block(j)));
      if (first + block(j) >= blocks) continue;
      uint2* const at = reinterpret_cast<uint2*>(codes) + (first + block(j)) * 16 + lane_of() % 8;
      at[0] = cast_eight(v[j][0], factor);
      at[8] = cast_eight(v[j][1], factor);
    }
    if (format.scales != ScaleFormat::kUe8m0 || first + kBlocks < blocks) return;
#pragma unroll 1
    for (std::uint32_t i = blocks + lane_of(); i < format.scale_bytes; i += 32) scales[i] = 0;
  }
};

// Casts the last block of a row, which has fewer than 128 columns: a vector for each lane.
__device__ __noinline__ inline void cast_last_block(const RowFormat& format, const std::uint8_t* x,
                                                    std::uint8_t* codes, std::uint8_t* scales) {
  const std::uint32_t block = format.hidden / 128;
  const bool mine = lane_of() < format.hidden % 128 / 8;
  uint4 v{0, 0, 0, 0};
  if (mine) v = reinterpret_cast<const uint4*>(x)[block * 16 + lane_of()];
  std::uint32_t m = max_magnitudes(v);
#pragma unroll 1
  for (int step = 16; step > 0; step /= 2) m = max_pair(m, __shfl_xor_sync(kFull, m, step));
  const float amax = fmaxf(kMinAmax, fmaxf(low_float(m), high_float(m)));
  const BlockScale scale = block_scale(amax, format.scales != ScaleFormat::kFloat32);
  if (mine) reinterpret_cast<uint2*>(codes)[block * 16 + lane_of()] = cast_eight(v, scale.inverse);
  __syncwarp();  // the padding after the whole blocks has been zeroed
  if (lane_of() == 0) put_scale(scales, format.scales, block, scale.scale);
  if (format.scales == ScaleFormat::kUe8m0 && block + 1 + lane_of() < format.scale_bytes)
    scales[block + 1 + lane_of()] = 0;
}

// Casts one step of a row: eight blocks, two for each eight lanes. `x` is the row in shared memory. One
// reduction and one division serve both blocks. The step is small on purpose: a small operation spends more
// time on fetching instructions than on arithmetic (kernels/PERFORMANCE.md).
__device__ inline void cast_step(const RowFormat& format, const std::uint8_t* x, std::uint8_t* codes,
                                 std::uint8_t* scales, std::uint32_t step) {
  const std::uint32_t blocks = format.hidden / 128;
  const ScaleFormat kind = format.scales;
  const std::uint32_t block = step * kCastStepBlocks + lane_of() / 8;
  const std::uint32_t from = shared_address(x) + block * 256 + lane_of() % 8 * 16;
  uint4 v[4] = {};
  if (block < blocks) load_shared_two(from, v[0], v[1]);
  if (block + 4 < blocks) load_shared_two(from + 1024, v[2], v[3]);
  const std::uint32_t a = max_pair(max_magnitudes(v[0]), max_magnitudes(v[1]));
  const std::uint32_t b = max_pair(max_magnitudes(v[2]), max_magnitudes(v[3]));
  std::uint32_t m = max_pair(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
  for (int other = 4; other > 0; other /= 2) m = max_pair(m, __shfl_xor_sync(kFull, m, other));
  const bool second = lane_of() % 8 >= 4;  // whether the lane has the second block's scale
  const float amax = fmaxf(kMinAmax, second ? high_float(m) : low_float(m));
  const BlockScale scale = block_scale(amax, kind != ScaleFormat::kFloat32);
  const std::uint32_t own = block + (second ? 4 : 0);
  if (lane_of() % 4 == 0 && own < blocks) put_scale(scales, kind, own, scale.scale);
  const float first_inverse = __shfl_sync(kFull, scale.inverse, 0, 8);
  const float second_inverse = __shfl_sync(kFull, scale.inverse, 4, 8);
  uint2* const at = reinterpret_cast<uint2*>(codes) + block * 16 + lane_of() % 8;
  if (block < blocks) at[0] = cast_eight(v[0], first_inverse);
  if (block < blocks) at[8] = cast_eight(v[1], first_inverse);
  if (block + 4 < blocks) at[64] = cast_eight(v[2], second_inverse);
  if (block + 4 < blocks) at[72] = cast_eight(v[3], second_inverse);
  if (kind != ScaleFormat::kUe8m0 || (step + 1) * kCastStepBlocks < blocks) return;
#pragma unroll 1
  for (std::uint32_t i = blocks + lane_of(); i < format.scale_bytes; i += 32) scales[i] = 0;
}

// Casts one row of the high-throughput path. The function is not inlined: the first execution of an
// instruction fetches it from memory, and a small operation notices this.
__device__ __noinline__ inline void cast_row(const void* row, std::uint8_t* codes, std::uint8_t* scales,
                                             const RowFormat& format) {
  using Section = CastSection<8>;
  const std::uint32_t blocks = format.hidden / 128;
#pragma unroll 1
  for (std::uint32_t first = 0; first < blocks; first += Section::kBlocks) {
    Section section;
    section.load(static_cast<const uint4*>(row) + first * 16, blocks - first);
    section.cast(format, codes, scales, first, blocks);
  }
  if (format.hidden % 128 != 0) cast_last_block(format, static_cast<const std::uint8_t*>(row), codes, scales);
}

}  // namespace epd::kernels::cuda
