// From top-k choices to slots: which rows go where, in the order that every run repeats.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace epd::kernels {

// One row that a token sends, as that source's `position`-th row at `target`: a rank (layout compact), or an
// expert (packed, expert).
struct RouteEntry {
  std::uint32_t target;
  std::uint32_t position;
};

// Routing of one rank's tokens. Entries of token t are entries[begin[t] .. begin[t+1]). Compact: one per rank
// that holds a choice, ranks ascending. Else one per distinct chosen expert, ordered by rank, then by the
// first k that names the expert. Positions count up in token order, so a row's final place is
// Placement::base[target] + position.
struct RoutingPlan {
  bool per_expert = false;
  std::vector<std::uint32_t> begin;          // [n+1]
  std::vector<RouteEntry> entries;           // [rows sent]
  std::vector<std::uint32_t> rank_counts;    // [R] tokens sent to each rank
  std::vector<std::uint32_t> expert_counts;  // [E] compact: selections of each expert; else rows sent to it
  std::vector<std::int32_t> topk;            // [n,K] validated private copy; choices of masked ranks are -1
  std::uint32_t num_dropped = 0;             // selections that named masked ranks

  std::uint32_t num_tokens() const {
    return begin.empty() ? 0 : static_cast<std::uint32_t>(begin.size() - 1);
  }
};

// `topk_idx` [n,K] as the caller has it; it may change while we look, so each value is read once.
struct RoutingInput {
  const void* topk_idx = nullptr;
  bool index64 = false;
  bool per_expert = false;
  std::uint32_t num_tokens = 0;
  std::uint32_t topk = 0;
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  std::span<const std::uint8_t> masked = {};  // [R] not 0: the rank is not there, its choices count as none
};

// The first choice outside [-1, num_experts).
struct RoutingError {
  bool bad = false;
  std::uint32_t token = 0;
  std::uint32_t k = 0;
  std::int64_t value = 0;
};

// Fills `plan` (its memory is reused). Compact: a token that chooses one rank several times, or one expert
// twice, sends one row, and expert_counts counts every selection.
RoutingError build_routing_plan(const RoutingInput& input, RoutingPlan& plan);

// What follows from everybody's counts for one rank: where its own rows begin, and what it receives. One
// array of int32 in sections, so that it can be kept as bytes (abi::placement_words).
class Placement {
 public:
  // Sizes the sections; contents are zero.
  void reset(std::uint32_t num_ranks, std::uint32_t num_experts, bool per_expert);

  std::span<std::int32_t> words() { return words_; }
  std::span<const std::int32_t> words() const { return words_; }
  // [R] or [E]: the place of this rank's first row at each rank, or for each expert in its rank's recv_x.
  std::span<const std::int32_t> base() const { return section(0, num_targets_); }
  std::span<const std::int32_t> rank_offsets() const;    // [R+1] tokens received from lower ranks
  std::span<const std::int32_t> expert_counts() const;   // [E/R]
  std::span<const std::int32_t> expert_offsets() const;  // [E/R+1], empty if compact
  std::span<const std::int32_t> source_ranges() const;   // [E/R,R,2] first row, rows; empty if compact

  std::uint32_t num_recv_rows = 0;  // M: compact and expert: rows received; packed: with padding

 private:
  friend struct PlacementBuilder;
  std::span<const std::int32_t> section(std::size_t first, std::size_t count) const {
    return std::span<const std::int32_t>(words_).subspan(first, count);
  }
  std::vector<std::int32_t> words_;
  std::uint32_t num_targets_ = 0;
  std::uint32_t num_ranks_ = 0;
  std::uint32_t experts_ = 0;  // of one rank
  bool per_expert_ = false;
};

// How a group's received rows lie; from its shape.
struct PlacementRules {
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  bool per_expert = false;
  bool expert_blocks = false;  // layout expert: each expert begins at a multiple of expert_capacity
  std::uint64_t expert_capacity = 0;
  std::uint32_t alignment = 1;  // packed: of each expert's first row; compact: expert_counts are rounded up
  std::uint64_t recv_rows = 0;  // room of recv_x
};

// Everybody's counts: [R] rows of the count matrices, null for a rank that does not take part.
struct PlacementCounts {
  std::span<const std::uint32_t* const> rank_counts;  // each [R]
  std::span<const std::uint32_t* const>
      expert_counts;  // each [E]; compact: only this rank's columns are read
};

// A rank that would receive more rows than there is room. All ranks find the same.
struct PlacementError {
  bool bad = false;
  std::uint32_t rank = 0;
  std::int32_t expert = -1;  // layout expert: the expert (of the group) whose block is too small
  std::uint64_t rows = 0;
  std::uint64_t room = 0;
};

PlacementError place_rows(const PlacementRules& rules, const PlacementCounts& counts, std::uint32_t rank,
                          Placement& placement);

// Ranges of rows of a rank's recv_x that no token fills, ascending. `all`: up to the room there is; else only
// the padding that aligns experts (packed), which lies below num_recv_rows.
struct RowRange {
  std::uint32_t begin = 0;
  std::uint32_t count = 0;
};
std::vector<RowRange> unfilled_rows(const PlacementRules& rules, const Placement& placement, bool all);

}  // namespace epd::kernels
