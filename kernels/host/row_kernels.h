// The inner loops over one row, once per vector path, and the choice among them. Internal: operations.h is
// the interface, tests and the benchmark reach in here to run every path.
#pragma once

#include "kernels/operations.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::kernels::host {

struct WeightedRow {
  const std::uint16_t* row;
  float weight;
};

// How outputs are stored. Cached: the reader finds them in a shared cache. Streaming: past the caches, for
// volumes that would not stay there; only where the address is a multiple of 64.
enum class Stores { kCached, kStreaming };

// Above this volume, the bytes that one rank's operation pushes or pulls, streaming is faster: README.md.
inline constexpr std::size_t kStreamingVolume = std::size_t{32} << 20;

inline Stores stores_for(std::size_t volume) {
  return volume > kStreamingVolume ? Stores::kStreaming : Stores::kCached;
}

// `hidden` and `bytes` are multiples of 128; pointers need their type's natural alignment only; outputs
// overlap nothing. Streaming stores may be pending on return: the caller ends its batch with store_fence().
struct RowKernels {
  const char* name;
  // Copies `bytes` from `source` to each destination.
  void (*copy_row)(const void* source, std::size_t bytes, std::span<void* const> destinations, Stores stores);
  // cast_block_e4m3 of every block of the row, codes to each destination. Scales: ordinary stores.
  void (*cast_row)(const std::uint16_t* x, std::size_t hidden, std::span<void* const> destinations,
                   float* scales, Stores stores);
  // out = bf16(sum of the rows in their order), as combine_rows says; no row gives zeros.
  void (*sum_rows)(std::span<const WeightedRow> rows, std::size_t hidden, std::uint16_t* out, Stores stores);
  void (*weighted_sum_rows)(std::span<const WeightedRow> rows, std::size_t hidden, std::uint16_t* out,
                            Stores stores);
  void (*store_fence)();
};

// Every path that this CPU can run, slowest first; never empty.
std::span<const RowKernels* const> available_row_kernels();

// The fastest of them.
const RowKernels& best_row_kernels();

// What dispatch_rows and combine_rows choose; tests and the benchmark choose otherwise.
struct Choice {
  const RowKernels* kernels;
  Stores stores;
};
Choice dispatch_choice(const DispatchArgs& args);
Choice combine_choice(const CombineArgs& args);

// dispatch_rows and combine_rows, so chosen.
void dispatch_rows_with(Choice choice, const DispatchArgs& args, std::uint32_t begin, std::uint32_t end);
void combine_rows_with(Choice choice, const CombineArgs& args, std::uint32_t begin, std::uint32_t end);

extern const RowKernels kPlainRowKernels;
#if defined(__x86_64__)
extern const RowKernels kAvx2RowKernels;
extern const RowKernels kAvx512RowKernels;
#endif

// A block that holds NaN or Inf: too rare for vectors. Also the definition that the paths must equal.
float cast_special_block(const std::uint16_t* x, std::uint8_t* q);

}  // namespace epd::kernels::host
