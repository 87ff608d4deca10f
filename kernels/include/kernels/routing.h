// From top-k choices to slots: which rows go where, in the order that every run repeats.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace epd::kernels {

// One row that a token sends: to `rank`, as that source's `position`-th row there.
struct RouteEntry {
  std::uint32_t rank;
  std::uint32_t position;
};

// Routing of one rank's tokens. Entries of token t are entries[begin[t] .. begin[t+1]), ranks
// ascending; positions count up in token order, so a row's final place is (rows at the destination from
// lower source ranks) + position.
struct RoutingPlan {
  std::vector<std::uint32_t> begin;          // [n+1]
  std::vector<RouteEntry> entries;           // [rows sent]
  std::vector<std::uint32_t> rank_counts;    // [R] rows to each rank
  std::vector<std::uint32_t> expert_counts;  // [E] selections of each expert
  std::vector<std::int32_t> topk;            // [n,K] validated private copy of the choices
  std::uint32_t num_dropped = 0;             // selections of masked ranks' experts; -1 in topk

  std::uint32_t num_tokens() const {
    return begin.empty() ? 0 : static_cast<std::uint32_t>(begin.size() - 1);
  }
};

// `topk_idx` [n,K] as the caller has it; it may change while we look, so each value is read once.
struct RoutingInput {
  const void* topk_idx = nullptr;
  bool index64 = false;
  std::uint32_t num_tokens = 0;
  std::uint32_t topk = 0;
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  std::span<const std::uint8_t> masked = {};  // [R] not 0: the rank is lost; empty: none is
};

// The first choice outside [-1, num_experts).
struct RoutingError {
  bool bad = false;
  std::uint32_t token = 0;
  std::uint32_t k = 0;
  std::int64_t value = 0;
};

// Fills `plan` (its memory is reused). A token that chooses one rank several times, or one expert
// twice, sends one row; expert_counts counts every selection. A selection of a masked rank's expert is taken
// as none and counted in num_dropped.
RoutingError build_routing_plan(const RoutingInput& input, RoutingPlan& plan);

// Takes the rows of ranks that were lost after the dispatch out of its plan. `gone` [R]. The places of the
// other rows stay as they are.
void drop_ranks(std::span<const std::uint8_t> gone, std::uint32_t num_experts, RoutingPlan& plan);

}  // namespace epd::kernels
