// From top-k choices to the places of rows. The result is the same in every run.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace epd::kernels {

// Leaves new elements uninitialised. Growing an array writes nothing, so a large array costs its pages only
// when they are used.
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

// One row that a token sends: its source's `position`-th row at `target`. A target is a rank (layout compact)
// or an expert (packed, expert).
struct RouteEntry {
  std::uint32_t target;
  std::uint32_t position;
};

// The routing of one rank's tokens. Entries of token t are entries[begin[t] .. begin[t+1]). Compact: one
// entry for each rank that holds a choice, ranks ascending. Else: one entry for each distinct chosen expert,
// ordered by rank, then by the first k that names the expert. Positions count up in token order, so the place
// of a row is Placement::base[target] + position.
struct RoutingPlan {
  bool per_expert = false;
  PlanArray<std::uint32_t> begin;            // [n+1]
  PlanArray<RouteEntry> entries;             // [rows sent]
  std::vector<std::uint32_t> rank_counts;    // [R] tokens sent to each rank
  std::vector<std::uint32_t> expert_counts;  // [E] compact: selections of each expert; else rows sent to it
  // [R] Per-expert layouts: selections that repeat an expert of the same token.
  std::vector<std::uint32_t> repeats;
  PlanArray<std::int32_t> topk;   // [n,K] validated private copy; choices of masked ranks are -1
  std::uint32_t num_dropped = 0;  // selections that named masked ranks

  std::uint32_t num_tokens() const {
    return begin.empty() ? 0 : static_cast<std::uint32_t>(begin.size() - 1);
  }
  // Returns the number of selections of the rank's experts.
  std::uint32_t selections_of(std::uint32_t rank) const;
};

// The input of a plan. The client may change `topk_idx` [n,K] at any time, so each value is read once.
struct RoutingInput {
  const void* topk_idx = nullptr;
  bool index64 = false;
  bool per_expert = false;
  std::uint32_t num_tokens = 0;
  std::uint32_t topk = 0;
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  std::span<const std::uint8_t> masked = {};  // [R] not 0: a masked rank, whose experts receive nothing
};

// The first choice that is num_experts or more. Every negative one is no selection.
struct RoutingError {
  bool bad = false;
  std::uint32_t token = 0;
  std::uint32_t k = 0;
  std::int64_t value = 0;
};

// Fills `plan`, and reuses its memory. Compact: a token that chooses several experts of a rank, or one expert
// twice, sends the rank one row; expert_counts counts every selection.
RoutingError build_routing_plan(const RoutingInput& input, RoutingPlan& plan);

// Builds a plan in steps, for a thread that has other work too. `plan` and what `input` views must stay valid
// until the planner is done or destroyed. Until then the plan is incomplete.
class RoutingPlanner {
 public:
  RoutingPlanner(const RoutingInput& input, RoutingPlan& plan);
  ~RoutingPlanner();

  // Plans that many more tokens. Returns true when it is done: the plan is complete, or error() has an error.
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

// The placement of one rank: where its own rows begin at the other ranks, and what it receives. It is one
// array of int32 in sections, so that it can be kept as bytes (abi::placement_words).
class Placement {
 public:
  // Sizes the sections and zeroes them.
  void reset(std::uint32_t num_ranks, std::uint32_t num_experts, bool per_expert);

  std::span<std::int32_t> words() { return words_; }
  std::span<const std::int32_t> words() const { return words_; }
  // [R] or [E]: the place of this rank's first row at each rank, or for each expert in recv_x of the expert's
  // rank.
  std::span<const std::int32_t> base() const { return section(0, num_targets_); }
  std::span<const std::int32_t> rank_offsets() const;    // [R+1] tokens received from lower ranks
  std::span<const std::int32_t> expert_counts() const;   // [E/R]
  std::span<const std::int32_t> expert_offsets() const;  // [E/R+1], empty if compact
  std::span<const std::int32_t> source_ranges() const;   // [E/R,R,2] first row, rows; empty if compact
  // Writes source_ranges() as the client gets them: `packed` as abi::RangeFormat::kPacked64.
  void write_source_ranges(bool packed, std::int32_t* to) const;

  std::uint32_t num_recv_rows = 0;  // M: compact and expert: rows received; packed: with padding
  // Sets num_recv_rows of a placement whose words were copied.
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

// How a group's received rows lie; follows from its shape.
struct PlacementRules {
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  bool per_expert = false;
  bool expert_blocks = false;  // layout expert: each expert begins at a multiple of expert_capacity
  std::uint64_t expert_capacity = 0;
  // Packed: each expert begins at a multiple of it. Compact: expert_counts are rounded up to it.
  std::uint32_t alignment = 1;
  std::uint64_t recv_rows = 0;  // size of recv_x in rows
  // [R] not 0: the ranks that rows are counted for and placed at, this rank among them; the others have base
  // 0. Empty: all.
  std::span<const std::uint8_t> destinations = {};
};

// The counts of all ranks: [R] rows of the count matrices; null for an inactive rank.
struct PlacementCounts {
  std::span<const std::uint32_t* const> rank_counts;  // [R] each
  // [E] each; compact: only this rank's columns are read.
  std::span<const std::uint32_t* const> expert_counts;
};

// A rank that would receive more rows than it has space for. All ranks find the same error.
struct PlacementError {
  bool bad = false;
  std::uint32_t rank = 0;
  std::int32_t expert = -1;  // layout expert: the expert, in the group's numbering, whose block is too small
  std::uint64_t rows = 0;
  std::uint64_t room = 0;
};

PlacementError place_rows(const PlacementRules& rules, const PlacementCounts& counts, std::uint32_t rank,
                          Placement& placement);

// Where the rows of one source lie at the targets: of a rank, for which another one places them.
struct SourcePlaces {
  std::uint32_t source = 0;
  std::vector<std::int32_t> base;     // [R] compact, else [E]
  std::vector<std::uint32_t> counts;  // likewise

  // Empties it.
  void reset(std::uint32_t num_ranks, std::uint32_t num_experts, bool per_expert);
  // Takes the places at `rank` from what that rank has placed.
  void take(std::uint32_t rank, const Placement& at_rank);
};

// Computes a placement in steps: the counts of some ranks in each step. `placement` and what `counts` views
// must stay valid until it is done.
class RowPlacer {
 public:
  // `others`: sources other than the rank, ascending, whose places are computed too.
  RowPlacer(const PlacementRules& rules, const PlacementCounts& counts, std::uint32_t rank,
            Placement& placement, std::span<SourcePlaces> others = {});

  // Takes the counts of that many more ranks. Returns true when it is done: the placement is complete, or
  // error() has an error.
  bool advance(std::uint32_t sources);
  const PlacementError& error() const { return error_; }

 private:
  // Sums of columns of a count matrix: over all sources, and over the sources below this rank.
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
  void note_other(SourcePlaces& other) const;
  bool is_destination(std::uint32_t rank) const {
    return rules_.destinations.empty() || rules_.destinations[rank] != 0;
  }
  std::vector<std::uint64_t> offsets_at(std::uint32_t rank) const;
  std::span<std::int32_t> writable(std::span<const std::int32_t> section) const;

  const PlacementRules rules_;
  const PlacementCounts counts_;
  const std::uint32_t rank_;
  Placement& placement_;
  const std::uint32_t experts_;  // of one rank
  std::uint32_t source_ = 0;     // the counts of lower sources are taken
  ColumnSums rows_;              // [R] compact, else [E]
  ColumnSums selections_;        // [E/R] compact: of this rank's experts
  std::span<SourcePlaces> others_;
  std::size_t next_other_ = 0;  // the first whose counts have not been taken
  PlacementError error_;
};

// A range of rows of recv_x that no token fills. unfilled_rows() returns them in ascending order: with `all`
// up to the size of recv_x, else only the padding that aligns experts (packed), which lies below
// num_recv_rows.
struct RowRange {
  std::uint32_t begin = 0;
  std::uint32_t count = 0;
};
std::vector<RowRange> unfilled_rows(const PlacementRules& rules, const Placement& placement, bool all);

}  // namespace epd::kernels
