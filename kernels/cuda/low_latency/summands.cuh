// The addition of rows, or of pieces of rows, by one warp.
#pragma once

#include "cuda/common/layout.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/sums.cuh"

namespace epd::kernels::cuda {

// The rows to be added up, in order of lanes.
struct Summands {
  std::uint32_t lanes;  // set of lanes that have a row
  const std::uint8_t* base;
  std::size_t pitch;
  std::uint32_t row;  // number of the lane's row
  float weight;       // weight of the lane's row
};

// Starts the loads of the lane's first `count` vectors of a row, 32 vectors apart, to shared memory.
__device__ inline void load_vectors(std::uint32_t to, const std::uint8_t* from, std::uint32_t count) {
  static_assert(kSummedVectors == 4);
  if (count > 0) thread_load<0>(to, from);
  if (count > 1) thread_load<512>(to, from);
  if (count > 2) thread_load<1024>(to, from);
  if (count > 3) thread_load<1536>(to, from);
}

// Adds up rows of weight 1 for one lane: `count` vectors of the rows, 32 vectors apart. `row(r)` is the
// address of the lane's first vector of row r; it is called for each row in turn, once or again from the
// first. Passes each rounded vector to store(i, vector). The stage holds kSummedAhead rows, if there are no
// more; else rows are added vector by vector. The loops are not unrolled: an operation runs through this code
// few times (kernels/CUDA_KERNELS.md).
template <typename Row, typename Store>
__device__ inline void add_staged(std::uint32_t stage, std::uint32_t rows, std::uint32_t count, Row row,
                                  Store store) {
  const bool fits = rows <= kSummedAhead;
  const std::uint32_t step = fits ? kSummedVectors : 1;  // vectors of a row in the stage
  const std::uint32_t most = fits ? kSummedAhead : kSummedAhead * kSummedVectors;  // rows in the stage
#pragma unroll 1
  for (std::uint32_t first = 0; first < kSummedVectors; first += step) {
    Eight sum;
    sum.clear();
    std::uint32_t begin = 0;
    do {
      const std::uint32_t end = min(rows, begin + most);
      std::uint32_t at = stage;
#pragma unroll 1
      for (std::uint32_t r = begin; r < end; ++r, at += step * 512) {
        const std::uint8_t* const from = row(r) + first * 512;
        if (fits) {
          load_vectors(at, from, count);
        } else if (first < count) {
          thread_load<0>(at, from);
        }
      }
      thread_loads_commit();
      thread_loads_wait<0>(0);
#pragma unroll 1
      for (std::uint32_t i = first; i < first + step; ++i) {
        if (fits) sum.clear();
#pragma unroll 1
        for (std::uint32_t r = begin; r < end; ++r)
          sum.add(load_shared(stage + ((r - begin) * step + i - first) * 512), 1.0f);
        if (end == rows && i < count) store(i, sum.rounded());
      }
      begin = end;
    } while (begin < rows);
  }
}

}  // namespace epd::kernels::cuda
