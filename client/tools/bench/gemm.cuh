// A client's work beside operations: C = A * B in bf16 on tensor cores, one tile of C to a CTA, any number of
// such products at once. Plain, not the fastest; what counts is that it keeps SMs, shared memory and tensor
// cores busy as a GEMM does.
#pragma once

#include "bench/gemm.h"

#include <cuda_bf16.h>
#include <mma.h>

#include <cstdint>

namespace epd::bench {

struct GemmTiles {
  __nv_bfloat16 a[kGemmTile][kGemmDepth + 8];  // 8: so that rows begin in other banks
  __nv_bfloat16 b[kGemmDepth][kGemmTile + 8];
};

// Of 16 bytes each, by all threads.
__device__ inline void load_tiles(GemmTiles& to, const __nv_bfloat16* a, const __nv_bfloat16* b,
                                  std::uint32_t n, std::uint32_t k) {
  for (std::uint32_t i = threadIdx.x; i < kGemmTile * kGemmDepth / 8; i += kGemmThreads) {
    const std::uint32_t row = i / (kGemmDepth / 8);
    const std::uint32_t column = i % (kGemmDepth / 8) * 8;
    *reinterpret_cast<uint4*>(&to.a[row][column]) =
        *reinterpret_cast<const uint4*>(a + std::size_t{row} * k + column);
  }
  for (std::uint32_t i = threadIdx.x; i < kGemmDepth * kGemmTile / 8; i += kGemmThreads) {
    const std::uint32_t row = i / (kGemmTile / 8);
    const std::uint32_t column = i % (kGemmTile / 8) * 8;
    *reinterpret_cast<uint4*>(&to.b[row][column]) =
        *reinterpret_cast<const uint4*>(b + std::size_t{row} * n + column);
  }
}

extern "C" __global__ void __launch_bounds__(kGemmThreads)
    bench_gemm(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, std::uint32_t n, std::uint32_t k,
               GemmStrides strides) {
  namespace wmma = nvcuda::wmma;
  __shared__ GemmTiles tiles[2];
  const std::uint32_t row = blockIdx.y * kGemmTile;
  const std::uint32_t column = blockIdx.x * kGemmTile;
  const std::uint32_t warp_row = threadIdx.x / 32 / 4 * 64;  // a warp has 64 x 32 of the tile
  const std::uint32_t warp_column = threadIdx.x / 32 % 4 * 32;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[4][2];
  for (auto& line : sum) {
    for (auto& part : line) wmma::fill_fragment(part, 0.0f);
  }
  a += blockIdx.z * strides.a + std::size_t{row} * k;
  b += blockIdx.z * strides.b + column;
  c += blockIdx.z * strides.c;
  load_tiles(tiles[0], a, b, n, k);
  for (std::uint32_t at = 0; at < k; at += kGemmDepth) {
    __syncthreads();
    const GemmTiles& now = tiles[at / kGemmDepth % 2];
    if (at + kGemmDepth < k) {
      load_tiles(tiles[(at / kGemmDepth + 1) % 2], a + at + kGemmDepth, b + std::size_t{at + kGemmDepth} * n,
                 n, k);
    }
    for (std::uint32_t step = 0; step < kGemmDepth; step += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> left[4];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::row_major> right[2];
      for (int i = 0; i < 4; ++i)
        wmma::load_matrix_sync(left[i], &now.a[warp_row + i * 16][step], kGemmDepth + 8);
      for (int j = 0; j < 2; ++j)
        wmma::load_matrix_sync(right[j], &now.b[step][warp_column + j * 16], kGemmTile + 8);
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 2; ++j) wmma::mma_sync(sum[i][j], left[i], right[j], sum[i][j]);
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      float* const to = c + std::size_t{row + warp_row + i * 16} * n + column + warp_column + j * 16;
      wmma::store_matrix_sync(to, sum[i][j], n, wmma::mem_row_major);
    }
  }
}

}  // namespace epd::bench
