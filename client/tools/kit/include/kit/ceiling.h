// The ceiling is what plain copies reach: one process per rank copies the bytes that an operation moves, row
// by row along the same routes, between shared mappings of the same sizes.
#pragma once

#include "kernels/reference.h"
#include "kernels/routing.h"
#include "kit/team.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace epd::kit {

// Bytes of one row as dispatch delivers it, with its scales.
std::uint64_t dispatch_row_bytes(const kernels::reference::GroupParams& params);
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
  CopyCeiling(const kernels::reference::GroupParams& params, std::uint32_t max_tokens);

  // Touches this rank's pages, and its page table entries of the others', for as many rows as an even routing
  // brings.
  void warm(std::uint32_t rank);
  // Copies every row of the plan to its slot at its destination. `bases`: see base_rows. Returns the bytes
  // copied.
  std::uint64_t copy_dispatch(std::uint32_t rank, const kernels::RoutingPlan& plan,
                              const std::vector<std::uint32_t>& bases, CopyKind kind);
  // Copies every row of the plan from its slot to the token's row here, one over the other. Returns the bytes
  // copied.
  std::uint64_t copy_combine(std::uint32_t rank, const kernels::RoutingPlan& plan,
                             const std::vector<std::uint32_t>& bases, CopyKind kind);

 private:
  char* row_at(const kernels::RouteEntry& entry, const std::vector<std::uint32_t>& bases,
               std::size_t row_bytes) const;

  std::uint64_t dispatch_bytes_;  // of a row
  std::uint64_t combine_bytes_;
  std::uint32_t targets_per_rank_;
  std::size_t warm_bytes_;
  std::vector<SharedArray<char>> tokens_;  // per rank [T, the larger row]
  std::vector<SharedArray<char>> rows_;    // per rank [as many as there can be, the larger row]
};

// The number of targets that a plan's entries can name on each rank: 1, the rank itself (compact layout), or
// its experts.
std::uint32_t targets_per_rank(const kernels::reference::GroupParams& params);

// Rows from each source to each target, [R, R * targets_per_rank].
struct TargetCounts {
  const std::uint32_t* rows = nullptr;
  std::uint32_t num_ranks = 1;
  std::uint32_t targets_per_rank = 1;
};
// This source's first row at each target. The rows of a rank's targets follow one another without holes.
std::vector<std::uint32_t> base_rows(const TargetCounts& counts, std::uint32_t source);
// Plans where a rank's rows go, tells the other ranks, and returns base_rows() when all have told theirs.
// `counts` is the ranks' memory of TargetCounts; it may be read until the next exchange. Throws ToolError.
std::vector<std::uint32_t> exchange_rows(const kernels::RoutingInput& input, TeamRank& self,
                                         std::uint32_t* counts, kernels::RoutingPlan& plan);
// Rows that `rank` receives, and those from `source`.
std::uint32_t received_rows(const TargetCounts& counts, std::uint32_t rank);
std::uint32_t rows_between(const TargetCounts& counts, std::uint32_t source, std::uint32_t rank);

}  // namespace epd::kit
