// epbench's own kernels: the image that gpu_driver.cpp loads.
#include "bench/copy_kernels.cuh"
#include "bench/kernel_arguments.h"

#include <cuda_bf16.h>
#include <mma.h>

#include <cstdint>

namespace epd::bench {

// ---- A client's work beside operations: C = A * B in bf16 on tensor cores, one tile of C to a CTA, any
// number of such products at once. Plain, not the fastest; what counts is that it keeps SMs, shared memory
// and tensor cores busy as a GEMM does.

struct GemmTiles {
  __nv_bfloat16 a[kGemmTile][kGemmDepth + 8];  // 8: so that rows begin in other banks
  __nv_bfloat16 b[kGemmDepth][kGemmTile + 8];
};

// All threads load, 16 bytes each.
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

// ---- A client's attention, of the shapes that `epbench layer` has: reading as many bytes, or multiplying as
// much, as the real thing. Logits are small (bench_random), so the softmax subtracts no maximum. Partial
// sums are neither merged nor divided.

// bf16 values in (-0.5, 0.5), so that clocks and power are as with real data.
extern "C" __global__ void __launch_bounds__(kRandomThreads)
    bench_random(__nv_bfloat16* to, std::uint64_t count) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * kRandomThreads;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * kRandomThreads + threadIdx.x; i < count; i += step) {
    std::uint64_t mixed = (i + 1) * 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    to[i] = __float2bfloat16(static_cast<float>(mixed >> 40) * 0x1p-24f - 0.5f);
  }
}

// keys, values [heads of all sequences, length, kHeadSize]; queries [heads of all sequences, kHeadSize];
// sums [heads of all sequences, splits, kHeadSize]. Grid (splits, heads of all sequences). 16 lanes have a
// token, eight values each.
extern "C" __global__ void __launch_bounds__(kAttentionThreads)
    bench_attention_decode(const __nv_bfloat16* keys, const __nv_bfloat16* values,
                           const __nv_bfloat16* queries, float* sums) {
  constexpr std::uint32_t kTokens = kAttentionThreads / 16;  // that the CTA has at a time
  constexpr std::uint32_t kAhead = 4;                        // loads under way of each thread, twice
  const std::uint32_t lane = threadIdx.x % 16;
  const std::uint32_t first = threadIdx.x / 16;
  const std::uint64_t begin = (std::uint64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kSplitTokens;
  const auto* const key_rows = reinterpret_cast<const uint4*>(keys + begin * kHeadSize);
  const auto* const value_rows = reinterpret_cast<const uint4*>(values + begin * kHeadSize);
  float query[8];
  for (int i = 0; i < 8; ++i)
    query[i] = __bfloat162float(queries[std::uint64_t{blockIdx.y} * kHeadSize + lane * 8 + i]);
  float sum[8] = {};
  for (std::uint32_t at = 0; at < kSplitTokens; at += kTokens * kAhead) {
    uint4 key[kAhead], value[kAhead];
    for (std::uint32_t i = 0; i < kAhead; ++i) {
      const std::uint32_t token = at + i * kTokens + first;
      key[i] = __ldcs(key_rows + token * 16 + lane);
      value[i] = __ldcs(value_rows + token * 16 + lane);
    }
    for (std::uint32_t i = 0; i < kAhead; ++i) {
      const auto* const its_key = reinterpret_cast<const __nv_bfloat16*>(&key[i]);
      const auto* const its_value = reinterpret_cast<const __nv_bfloat16*>(&value[i]);
      float logit = 0;
      for (int j = 0; j < 8; ++j) logit += query[j] * __bfloat162float(its_key[j]);
      for (int width = 8; width > 0; width /= 2) logit += __shfl_xor_sync(0xffffffff, logit, width);
      const float weight = exp2f(logit);
      for (int j = 0; j < 8; ++j) sum[j] += weight * __bfloat162float(its_value[j]);
    }
  }
  __shared__ float parts[kTokens][kHeadSize];
  for (int i = 0; i < 8; ++i) parts[first][lane * 8 + i] = sum[i];
  __syncthreads();
  if (threadIdx.x >= kHeadSize) return;
  float all = 0;
  for (std::uint32_t i = 0; i < kTokens; ++i) all += parts[i][threadIdx.x];
  sums[(std::uint64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kHeadSize + threadIdx.x] = all;
}

struct alignas(32) AttentionTiles {
  __nv_bfloat16 keys[kKeys][kHeadSize + 8];  // 8: so that rows begin in other banks
  __nv_bfloat16 values[kKeys][kHeadSize + 8];
  // Each warp has logits here, then weights in their place.
  union {
    float logits[16][kKeys + 4];
    __nv_bfloat16 weights[16][2 * (kKeys + 4)];
  } warps[kAttentionThreads / 32];
};

__device__ inline void load_rows(__nv_bfloat16 (*to)[kHeadSize + 8], const __nv_bfloat16* from) {
  for (std::uint32_t i = threadIdx.x; i < kKeys * kHeadSize / 8; i += kAttentionThreads) {
    const std::uint32_t row = i / (kHeadSize / 8);
    const std::uint32_t column = i % (kHeadSize / 8) * 8;
    *reinterpret_cast<uint4*>(&to[row][column]) =
        *reinterpret_cast<const uint4*>(from + std::size_t{row} * kHeadSize + column);
  }
}

// queries, keys, values [heads, tokens, kHeadSize], causal; sums the same in float. Grid (tokens / kQueries,
// heads); the longest CTAs come first.
extern "C" __global__ void __launch_bounds__(kAttentionThreads)
    bench_attention_prefill(const __nv_bfloat16* queries, const __nv_bfloat16* keys,
                            const __nv_bfloat16* values, float* sums) {
  namespace wmma = nvcuda::wmma;
  __shared__ AttentionTiles tiles;
  const std::uint32_t block = gridDim.x - 1 - blockIdx.x;
  const std::uint32_t warp = threadIdx.x / 32;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::size_t head = std::size_t{blockIdx.y} * gridDim.x * kQueries * kHeadSize;
  const std::uint32_t query = block * kQueries + warp * 16;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> own[kHeadSize / 16];
  for (std::uint32_t i = 0; i < kHeadSize / 16; ++i)
    wmma::load_matrix_sync(own[i], queries + head + std::size_t{query} * kHeadSize + i * 16, kHeadSize);
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[kHeadSize / 16];
  for (auto& part : sum) wmma::fill_fragment(part, 0.0f);
  auto& its = tiles.warps[warp];
  for (std::uint32_t at = 0; at < (block + 1) * kQueries; at += kKeys) {
    __syncthreads();
    load_rows(tiles.keys, keys + head + std::size_t{at} * kHeadSize);
    load_rows(tiles.values, values + head + std::size_t{at} * kHeadSize);
    __syncthreads();
    for (std::uint32_t key = 0; key < kKeys; key += 16) {
      wmma::fragment<wmma::accumulator, 16, 16, 16, float> logits;
      wmma::fill_fragment(logits, 0.0f);
      for (std::uint32_t i = 0; i < kHeadSize / 16; ++i) {
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> theirs;
        wmma::load_matrix_sync(theirs, &tiles.keys[key][i * 16], kHeadSize + 8);
        wmma::mma_sync(logits, own[i], theirs, logits);
      }
      wmma::store_matrix_sync(&its.logits[0][key], logits, kKeys + 4, wmma::mem_row_major);
    }
    __syncwarp();
    float row[16];  // lane has the key, so a row is the lanes'
    for (std::uint32_t i = 0; i < 16; ++i)
      row[i] = at + lane <= query + i ? exp2f(its.logits[i][lane]) : 0.0f;
    __syncwarp();
    for (std::uint32_t i = 0; i < 16; ++i) its.weights[i][lane] = __float2bfloat16(row[i]);
    __syncwarp();
    for (std::uint32_t key = 0; key < kKeys; key += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> weights;
      wmma::load_matrix_sync(weights, &its.weights[0][key], 2 * (kKeys + 4));
      for (std::uint32_t i = 0; i < kHeadSize / 16; ++i) {
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::row_major> theirs;
        wmma::load_matrix_sync(theirs, &tiles.values[key][i * 16], kHeadSize + 8);
        wmma::mma_sync(sum[i], weights, theirs, sum[i]);
      }
    }
  }
  for (std::uint32_t i = 0; i < kHeadSize / 16; ++i)
    wmma::store_matrix_sync(sums + head + std::size_t{query} * kHeadSize + i * 16, sum[i], kHeadSize,
                            wmma::mem_row_major);
}

static_assert(kKeys == 32 && kQueries == kAttentionThreads / 32 * 16, "a lane has a key, a warp 16 queries");

}  // namespace epd::bench
