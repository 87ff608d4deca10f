// From top-k choices to slots: which rows go where, in the order that every run repeats.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace epd::kernels {

// Elements come as the memory is: growing an array writes nothing, so a large one costs its pages only when
// they are used.
template <typename T>
class UnsetAllocator : public std::allocator<T> {
 public:
  template <typename U>
  struct rebind {
    using other = UnsetAllocator<U>;
  };
  template <typename U>
  void construct(U* place) noexcept {
    ::new (static_cast<void*>(place)) U;
  }
  template <typename U, typename... Args>
  void construct(U* place, Args&&... args) {
    ::new (static_cast<void*>(place)) U(std::forward<Args>(args)...);
  }
};
template <typename T>
using PlanArray = std::vector<T, UnsetAllocator<T>>;

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
  PlanArray<std::uint32_t> begin;            // [n+1]
  PlanArray<RouteEntry> entries;             // [rows sent]
  std::vector<std::uint32_t> rank_counts;    // [R] tokens sent to each rank
  std::vector<std::uint32_t> expert_counts;  // [E] compact: selections of each expert; else rows sent to it
  std::vector<std::uint32_t> repeats;        // [R] per expert: selections that name an expert once more
  PlanArray<std::int32_t> topk;              // [n,K] validated private copy; choices of masked ranks are -1
  std::uint32_t num_dropped = 0;             // selections that named masked ranks

  std::uint32_t num_tokens() const {
    return begin.empty() ? 0 : static_cast<std::uint32_t>(begin.size() - 1);
  }
  // Selections of the rank's experts.
  std::uint32_t selections_of(std::uint32_t rank) const;
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

// The same in pieces, for a thread that has other things to do meanwhile. What `input` views, and `plan`,
// must stay until it is done or gone; till then the plan is not one.
class RoutingPlanner {
 public:
  RoutingPlanner(const RoutingInput& input, RoutingPlan& plan);
  ~RoutingPlanner();

  // Plans so many tokens more. True: nothing is left to do, or error() says what is wrong.
  bool advance(std::uint32_t tokens);
  const RoutingError& error() const { return error_; }

  class Filler;

 private:
  const RoutingInput input_;
  RoutingPlan& plan_;
  std::unique_ptr<Filler> filler_;
  std::uint32_t token_ = 0;
  RoutingError error_;
};

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
  // Sets it, of one whose words were copied.
  void count_rows(bool expert_blocks);

 private:
  friend class RowPlacer;
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

// The same in pieces: the counts of some ranks after those of others. What `counts` views, and `placement`,
// must stay until it is done.
class RowPlacer {
 public:
  RowPlacer(const PlacementRules& rules, const PlacementCounts& counts, std::uint32_t rank,
            Placement& placement);

  // Takes in the counts of so many ranks more. True: all is placed, or error() says what is wrong.
  bool advance(std::uint32_t sources);
  const PlacementError& error() const { return error_; }

 private:
  // Sums of columns of a count matrix: over all sources, and over those below this rank.
  struct ColumnSums {
    std::vector<std::uint64_t> total;
    std::vector<std::uint64_t> below;

    void add(const std::uint32_t* columns);
  };

  void take_in(std::uint32_t source);
  PlacementError place() const;
  PlacementError place_compact() const;
  PlacementError place_experts() const;
  PlacementError check_room() const;
  void place_own(const std::vector<std::uint64_t>& offsets) const;
  std::vector<std::uint64_t> offsets_at(std::uint32_t rank) const;
  std::span<std::int32_t> writable(std::span<const std::int32_t> section) const;

  const PlacementRules rules_;
  const PlacementCounts counts_;
  const std::uint32_t rank_;
  Placement& placement_;
  const std::uint32_t experts_;  // of one rank
  std::uint32_t source_ = 0;     // those below have been taken in
  ColumnSums rows_;              // [R] compact, else [E]
  ColumnSums selections_;        // [E/R] compact: of this rank's experts
  PlacementError error_;
};

// Ranges of rows of a rank's recv_x that no token fills, ascending. `all`: up to the room there is; else only
// the padding that aligns experts (packed), which lies below num_recv_rows.
struct RowRange {
  std::uint32_t begin = 0;
  std::uint32_t count = 0;
};
std::vector<RowRange> unfilled_rows(const PlacementRules& rules, const Placement& placement, bool all);

}  // namespace epd::kernels
