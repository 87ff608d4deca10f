#include "kernels_far_cases.h"

#include <ostream>

namespace epd::kernels::testing_cases {

FarShape FarCase::shape() const {
  FarShape shape;
  shape.format = c.format();
  shape.num_ranks = c.params.num_ranks;
  shape.experts_per_rank = c.experts_per_rank();
  shape.topk = c.params.topk;
  shape.hidden = c.params.hidden;
  shape.per_expert = c.params.layout != reference::Layout::kCompact;
  shape.index64 = c.index64;
  shape.crc = crc;
  return shape;
}

std::vector<std::uint32_t> FarCase::ranks_of(std::uint32_t node) const {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    if (is_near(r, node)) ranks.push_back(r);
  }
  return ranks;
}

std::vector<std::uint32_t> FarCase::nodes_seen_from(std::uint32_t node) const {
  std::vector<std::uint32_t> nodes;
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    nodes.push_back(is_there(r) && node_of_rank[r] != node ? node_of_rank[r] : kNotFar);
  }
  return nodes;
}

std::vector<std::uint8_t> FarCase::whole_domains() const {
  if (c.params.sum_ranks == 0) return {};
  std::vector<std::uint8_t> whole;
  for (std::uint32_t first = 0; first < c.params.num_ranks; first += c.params.sum_ranks) {
    std::vector<std::uint32_t> on;
    for (std::uint32_t r = first; r < first + c.params.sum_ranks && r < c.params.num_ranks; ++r) {
      if (is_there(r)) on.push_back(node_of_rank[r]);
    }
    whole.push_back(std::count(on.begin(), on.end(), on.empty() ? 0 : on[0]) ==
                    static_cast<std::ptrdiff_t>(on.size()));
  }
  return whole;
}

std::vector<PlanArray<std::uint32_t>> FarCase::lists(std::uint32_t source, std::uint32_t piece) const {
  std::vector<PlanArray<std::uint32_t>> lists(num_nodes);
  for (PlanArray<std::uint32_t>& list : lists) list.assign(3, 77);  // of an earlier operation
  const std::vector<std::uint32_t> nodes = nodes_seen_from(node_of_rank[source]);
  FarLister lister(shape(), c.plans[source], nodes, lists);
  while (!lister.advance(piece)) {
  }
  return lists;
}

SourcePlaces FarCase::places(std::uint32_t source, std::uint32_t node) const {
  SourcePlaces places;
  places.source = source;
  places.reset(c.params.num_ranks, c.params.num_experts, c.rules.per_expert);
  for (const std::uint32_t rank : ranks_of(node)) places.take(rank, c.placements[rank]);
  return places;
}

std::vector<std::int64_t> FarCase::choices_on(std::uint32_t node, std::uint32_t source,
                                              std::uint32_t token) const {
  std::vector<std::int64_t> choices;
  for (std::uint32_t k = 0; k < c.params.topk; ++k) {
    const std::int64_t expert = c.inputs[source].topk_idx[std::size_t{token} * c.params.topk + k];
    const bool there =
        expert >= 0 && is_near(static_cast<std::uint32_t>(expert) / c.experts_per_rank(), node);
    choices.push_back(there ? expert : -1);
  }
  return choices;
}

void split_into_nodes(std::mt19937& random, FarCase& far) {
  far.num_nodes = between(random, 1, 4);
  far.node_of_rank.clear();
  for (std::uint32_t r = 0; r < far.c.params.num_ranks; ++r)
    far.node_of_rank.push_back(between(random, 0, far.num_nodes - 1));
  if (between(random, 0, 2) != 0) std::sort(far.node_of_rank.begin(), far.node_of_rank.end());
}

FarCase random_far_case(std::uint32_t seed, const host::RowKernels* kernels) {
  FarCase far;
  far.c = random_case(seed, kernels);
  std::mt19937 random(seed + 1);
  split_into_nodes(random, far);
  far.crc = seed % 2 == 0;
  return far;
}

std::ostream& operator<<(std::ostream& out, const FarCase& far) {
  out << far.c << " nodes";
  for (const std::uint32_t node : far.node_of_rank) out << " " << node;
  if (far.lost != kNoRank) out << " lost " << far.lost;
  if (far.crc) out << " crc";
  return out;
}

}  // namespace epd::kernels::testing_cases
