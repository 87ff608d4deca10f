// The inner loops over one row, once per vector path, and the choice among them. Internal: operations.h is
// the interface, tests and the benchmark reach in here to run every path.
#pragma once

#include "kernels/numbers.h"
#include "kernels/operations.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::kernels::host {

struct WeightedRow {
  const std::uint16_t* row;
  float weight;  // canonical (weights.h); 1 if the sum is not weighted
};

// A row to be cast.
struct CastRow {
  const std::uint16_t* x;
  std::size_t hidden;
  float* scales;  // out, one per block
  bool pow2;
};

// Consecutive summands of an output row: partial sums, or rows where there are none.
struct SumDomain {
  std::uint32_t summands;
  bool rounded;  // they are summed first, and rounded to bf16; else each is added as it is
};

// What one output row is the sum of, as combine_rows says.
struct RowSum {
  std::span<const WeightedRow> rows;
  // Numbers of consecutive rows that are summed first, and rounded to bf16; empty: every row is added as it
  // is.
  std::span<const std::uint32_t> partial_sums;
  // In order, all summands; empty: every summand is added as it is.
  std::span<const SumDomain> domains;
  bool weighted = false;
};

// How far a walk through a RowSum has come.
struct Summands {
  const WeightedRow* row;
  const std::uint32_t* partial_sum;
};

// How outputs are stored. Cached: the reader finds them in a shared cache. Streaming: past the caches, for
// volumes that would not stay there; only whole lines of 64 bytes.
enum class Stores { kCached, kStreaming };

// How far ahead inputs are prefetched, bytes: of a cast, whose stores and arithmetic leave the hardware's
// prefetcher behind; of partial sums, which read more rows at once than it follows. See README.md.
inline constexpr std::size_t kCastAhead = 4096;
inline constexpr std::size_t kSumAhead = 1024;

// Above this volume, the bytes that one rank's operation pushes or pulls, streaming is faster everywhere.
inline constexpr std::size_t kStreamingVolume = std::size_t{32} << 20;

// `hidden` is a multiple of 128, `bytes` of 16; pointers need their type's natural alignment only; outputs
// overlap nothing. Streaming stores may be pending on return: the caller ends its batch with store_fence().
struct RowKernels {
  const char* name;
  // Copies `bytes` from `source` to each destination.
  void (*copy_row)(const void* source, std::size_t bytes, std::span<void* const> destinations, Stores stores);
  // Every block of the row, codes to each destination: cast_block_e4m3, or with `pow2` cast_block_e4m3_pow2.
  // Scales: ordinary stores.
  void (*cast_row)(const CastRow& row, std::span<void* const> destinations, Stores stores);
  // No row gives zeros.
  void (*sum_rows)(const RowSum& sum, std::size_t hidden, std::uint16_t* out, Stores stores);
  void (*store_fence)();
};

// Every path that this CPU can run, slowest first; never empty.
std::span<const RowKernels* const> available_row_kernels();

// The fastest of them.
const RowKernels& best_row_kernels();

// dispatch_rows and combine_rows with what they choose otherwise: the best kernels, and StorePolicy's stores.
struct Choice {
  const RowKernels* kernels;
  Stores stores;
};
void dispatch_rows_with(Choice choice, const DispatchArgs& args, std::uint32_t begin, std::uint32_t end);
void combine_rows_with(Choice choice, const CombineArgs& args, std::uint32_t begin, std::uint32_t end);

extern const RowKernels kPlainRowKernels;
#if defined(__x86_64__)
extern const RowKernels kAvx2RowKernels;
extern const RowKernels kAvx512RowKernels;
#endif

// How a block with this amax is scaled.
struct BlockScale {
  float scale;
  float inverse;  // what elements are multiplied by
};
inline BlockScale block_scale(float amax, bool pow2) {
  if (!pow2) return {amax / kE4m3Max, kE4m3Max / amax};
  // amax comes from bf16 or is kMinAmax: the quotient is a normal number, rounded onto a power of two only
  // where it is one; an infinite one gives Inf and 0.
  const auto bits = std::bit_cast<std::uint32_t>(amax / kE4m3Max);
  const std::uint32_t exponent = (bits + 0x7fffffu) >> 23;
  return {std::bit_cast<float>(exponent << 23),
          exponent == 255 ? 0.0f : std::bit_cast<float>((254 - exponent) << 23)};
}

// A block that holds NaN or Inf: too rare for vectors. Returns the scale.
float cast_special_block(const std::uint16_t* x, bool pow2, std::uint8_t* q);

}  // namespace epd::kernels::host
