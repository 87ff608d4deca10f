// The addition of rows, or of pieces of rows, by one warp in registers.
#pragma once

#include "cuda/common/layout.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/signal.cuh"
#include "cuda/common/sums.cuh"
#include "cuda/common/weights.cuh"

namespace epd::kernels::cuda {

// The rows to be added up, in order of lanes.
struct Summands {
  std::uint32_t lanes;  // set of lanes that have a row
  const std::uint8_t* base;
  std::size_t pitch;
  std::uint32_t row;  // number of the lane's row
  float weight;       // weight of the lane's row
};

// Rows whose loads are in flight together.
inline constexpr std::uint32_t kSummedRows = 2;

// Adds up the biases, then the rows, and passes each rounded vector to store(i, vector). `vectors` has
// between one and kSummedAtOnce vectors.
template <typename Store>
__device__ inline void add_rows(const Summands& rows, Range vectors, const std::uint8_t* const (&biases)[2],
                                Store store) {
  std::uint32_t at[kSummedVectors];  // a lane without a vector reads the last one
  Eight sums[kSummedVectors];
#pragma unroll
  for (std::uint32_t i = 0; i < kSummedVectors; ++i) {
    at[i] = min(vectors.begin + lane_of() + i * 32, vectors.end - 1);
    sums[i].clear();
  }
  const auto load = [&at](const std::uint8_t* row, std::uint32_t i) {
    return __ldcg(reinterpret_cast<const uint4*>(row) + at[i]);
  };
#pragma unroll
  for (const std::uint8_t* const bias : biases) {  // unrolled: an indexed array would be in local memory
    if (bias == nullptr) continue;
#pragma unroll
    for (std::uint32_t i = 0; i < kSummedVectors; ++i) sums[i].add(load(bias, i), 1.0f);
  }
#pragma unroll 1
  for (std::uint32_t left = rows.lanes; left != 0;) {
    const std::uint32_t count = __popc(left);
    uint4 loaded[kSummedRows][kSummedVectors];
    float weights[kSummedRows];
#pragma unroll
    for (std::uint32_t r = 0; r < kSummedRows; ++r) {
      if (r >= count) break;
      const int lane = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      weights[r] = __shfl_sync(kFull, rows.weight, lane);
      const std::uint8_t* const row = rows.base + __shfl_sync(kFull, rows.row, lane) * rows.pitch;
#pragma unroll
      for (std::uint32_t i = 0; i < kSummedVectors; ++i) loaded[r][i] = load(row, i);
    }
#pragma unroll
    for (std::uint32_t r = 0; r < kSummedRows; ++r) {
      if (r >= count) break;
#pragma unroll
      for (std::uint32_t i = 0; i < kSummedVectors; ++i) sums[i].add(loaded[r][i], weights[r]);
    }
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kSummedVectors; ++i) {
    if (vectors.begin + lane_of() + i * 32 < vectors.end) store(at[i], sums[i].rounded());
  }
}

}  // namespace epd::kernels::cuda
