// The inner loops over one row, once for each vector path, and the choice among the paths. Internal:
// rows.h is the interface. Tests and the benchmark use this header to run every path.
#pragma once

#include "kernels/numbers.h"
#include "kernels/rows.h"

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

// The summands of one output row, as combine_rows says.
struct RowSum {
  std::span<const WeightedRow> rows;
  // The numbers of consecutive rows in each partial sum, which is rounded to bf16. Empty: there are no
  // partial sums.
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

// How far ahead inputs are prefetched, in bytes. A cast needs it because its stores and arithmetic outrun the
// hardware's prefetcher. Partial sums need it because they read more rows at once than the prefetcher
// follows. See HOST_KERNELS.md.
inline constexpr std::size_t kCastAhead = 4096;
inline constexpr std::size_t kSumAhead = 1024;

// The volume is what one rank's operation writes or pulls, in bytes. Above this one, streaming is always
// faster.
inline constexpr std::size_t kStreamingVolume = std::size_t{32} << 20;

// The inner loops of one vector path. `hidden` and `bytes` are multiples of 8. Pointers need only their
// type's natural alignment. Outputs overlap nothing. Streaming stores may be pending on return, so the caller
// ends its batch with store_fence().
struct RowKernels {
  const char* name;
  // Copies `bytes` from `source` to each destination.
  void (*copy_row)(const void* source, std::size_t bytes, std::span<void* const> destinations, Stores stores);
  // Casts every block of the row and copies the codes to each destination, as cast_block_e4m3 does, or with
  // `pow2` as cast_block_e4m3_pow2 does. Scales are stored with ordinary stores.
  void (*cast_row)(const CastRow& row, std::span<void* const> destinations, Stores stores);
  // Adds up rows into `out`. The sum of no rows is zero.
  void (*sum_rows)(const RowSum& sum, std::size_t hidden, std::uint16_t* out, Stores stores);
  void (*store_fence)();
  // Null, or do the same with ordinary stores to one place, and return the CRC-32C of what was stored: on
  // their way through registers it costs next to nothing.
  std::uint32_t (*copy_row_crc)(const void* source, std::size_t bytes, void* destination) = nullptr;
  std::uint32_t (*sum_rows_crc)(const RowSum& sum, std::size_t hidden, std::uint16_t* out) = nullptr;
};

// Returns all paths that this CPU can run, slowest first; there is at least one.
std::span<const RowKernels* const> available_row_kernels();

// Returns the fastest path.
const RowKernels& best_row_kernels();

// The path and stores for dispatch_rows_with and combine_rows_with. dispatch_rows and combine_rows choose the
// fastest path and StorePolicy's stores.
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
extern const RowKernels kAvx512CrcRowKernels;  // with vpclmulqdq
#endif

// The scale of a block.
struct BlockScale {
  float scale;
  float inverse;  // what elements are multiplied by
};
inline BlockScale block_scale(float amax, bool pow2) {
  if (!pow2) return {amax / kE4m3Max, kE4m3Max / amax};
  // `amax` comes from bf16 or is kMinAmax. So the quotient is a normal number, and it is rounded to a power
  // of two only if it is one. An infinite quotient gives Inf and 0.
  const auto bits = std::bit_cast<std::uint32_t>(amax / kE4m3Max);
  const std::uint32_t exponent = (bits + 0x7fffffu) >> 23;
  return {std::bit_cast<float>(exponent << 23),
          exponent == 255 ? 0.0f : std::bit_cast<float>((254 - exponent) << 23)};
}

// Casts a block that has NaN or Inf and returns its scale. Such blocks are too rare for vectors.
float cast_special_block(std::span<const std::uint16_t> x, bool pow2, std::uint8_t* q);

// The columns after the last whole block of a row, from `start` on, which vectors leave to the plain path.
// They cast one block, or none, and sum fewer columns than a block.
void cast_rest(const CastRow& row, std::size_t start, std::span<void* const> destinations);
void sum_rest(const RowSum& sum, std::size_t start, std::size_t hidden, std::uint16_t* out);

}  // namespace epd::kernels::host
