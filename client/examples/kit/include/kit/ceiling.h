// What plain copies reach: the bytes that an operation moves, copied row by row along the same routes, by one
// process per rank, between shared mappings of the same sizes.
#pragma once

#include "kernels/routing.h"
#include "kit/shared_array.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace epd::kit {

struct CeilingShape {
  std::uint32_t num_ranks = 1;
  std::uint32_t max_tokens = 1;
  std::uint32_t hidden = 128;
  bool fp8 = false;  // of dispatch: rows of H + 4*H/128 bytes are copied instead of 2H
};

// Bytes of one row as dispatch delivers it.
std::uint64_t dispatch_row_bytes(std::uint32_t hidden, bool fp8);
// Bytes of one row as combine pulls it.
std::uint64_t combine_row_bytes(std::uint32_t hidden);

// How rows are copied. Which one is faster depends on sizes and on the machine, so both are measured, and the
// faster one is the ceiling.
enum class CopyKind {
  kMemcpy,     // the C library's
  kStreaming,  // with stores that bypass caches, where the processor has them
};
// The kind for the i-th measurement: they take turns.
CopyKind copy_kind(std::size_t i);
// begins, ends: [measurements, ranks] that took turns. The smaller of the two kinds' p50 times from the first
// rank's begin to the last one's end, us.
double ceiling_time_us(std::span<const double> begins, std::span<const double> ends, std::size_t ranks);

// Made before the fork; each rank calls warm() once, then all ranks copy at once between barriers.
class CopyCeiling {
 public:
  explicit CopyCeiling(const CeilingShape& shape);

  // Touches this rank's pages, and its page table entries of the others'.
  void warm(std::uint32_t rank);
  // Every row of the plan to its slot at its destination. bases[d]: this rank's first row there.
  // Returns the bytes copied.
  std::uint64_t copy_dispatch(std::uint32_t rank, const kernels::RoutingPlan& plan,
                              const std::vector<std::uint32_t>& bases, CopyKind kind);
  // Every row of the plan from its slot there to the token's row here, over one another. Returns the bytes.
  std::uint64_t copy_combine(std::uint32_t rank, const kernels::RoutingPlan& plan,
                             const std::vector<std::uint32_t>& bases, CopyKind kind);

 private:
  CeilingShape shape_;
  std::vector<SharedArray<char>> tokens_;  // per rank [T, 2H bytes]
  std::vector<SharedArray<char>> rows_;    // per rank [R*T, 2H bytes]
};

// counts: [R,R], rows from source to destination. This source's first row at each destination.
std::vector<std::uint32_t> base_rows(const std::uint32_t* counts, std::uint32_t num_ranks,
                                     std::uint32_t source);
// Rows that `rank` receives.
std::uint32_t received_rows(const std::uint32_t* counts, std::uint32_t num_ranks, std::uint32_t rank);

}  // namespace epd::kit
