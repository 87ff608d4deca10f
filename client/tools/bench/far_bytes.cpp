#include "far_bytes.h"

#include "kit/ceiling.h"
#include "kit/nodes.h"
#include "proto/far.h"

#include <algorithm>
#include <vector>

namespace epd::bench {
namespace {

std::uint64_t sum_bytes(const RunPlan& plan) {
  return abi::far_sum_bytes(kit::combine_row_bytes(plan.hidden), plan.return_weights ? plan.topk : 0);
}

class Places {
 public:
  explicit Places(const RunPlan& plan) : experts_per_rank_(plan.experts / plan.ranks) {
    for (std::uint32_t rank = 0; rank < plan.ranks; ++rank)
      nodes_.push_back(kit::place_of(rank, plan.ranks, plan.nodes).node);
    const std::uint32_t domain = plan.sum_ranks == 0 ? plan.ranks : plan.sum_ranks;
    for (std::uint32_t rank = 0; rank < plan.ranks; ++rank) {
      const std::uint32_t first = rank / domain * domain;
      const std::uint32_t last = std::min(first + domain, plan.ranks) - 1;
      summed_by_.push_back(nodes_[first] == nodes_[last] ? first : rank);
    }
  }
  std::uint32_t rank_of(std::int32_t expert) const {
    return static_cast<std::uint32_t>(expert) / experts_per_rank_;
  }
  std::uint32_t node_of(std::uint32_t rank) const { return nodes_[rank]; }
  // Equal for ranks whose rows cross as one sum.
  std::uint32_t sum_of(std::uint32_t rank) const { return summed_by_[rank]; }
  std::uint32_t ranks_of(std::uint32_t node) const {
    return static_cast<std::uint32_t>(std::count(nodes_.begin(), nodes_.end(), node));
  }

 private:
  std::uint32_t experts_per_rank_;
  std::vector<std::uint32_t> nodes_, summed_by_;
};

std::uint64_t distinct(std::vector<std::uint32_t>& values) {
  std::sort(values.begin(), values.end());
  return static_cast<std::uint64_t>(std::unique(values.begin(), values.end()) - values.begin());
}

std::uint64_t announcement_bytes(const RunPlan& plan, std::uint32_t ranks_there) {
  const bool per_expert = plan.layout != EPD_LAYOUT_COMPACT;
  const std::uint64_t counts = ranks_there * (per_expert ? plan.experts / plan.ranks : 1);
  return sizeof(abi::FarHeader) + sizeof(abi::FarAnnouncement) + sizeof(std::uint32_t) * counts;
}

}  // namespace

FarBytes far_bytes(const RunPlan& plan, std::uint32_t rank, std::span<const std::int32_t> topk_idx) {
  const Places places(plan);
  const std::uint32_t own = places.node_of(rank);
  FarBytes bytes;
  std::uint64_t records = 0;
  std::vector<std::uint32_t> nodes, sums;
  for (std::size_t at = 0; at < topk_idx.size(); at += plan.topk) {
    nodes.clear(), sums.clear();
    for (const std::int32_t expert : topk_idx.subspan(at, plan.topk)) {
      if (expert < 0 || places.node_of(places.rank_of(expert)) == own) continue;
      nodes.push_back(places.node_of(places.rank_of(expert)));
      sums.push_back(places.sum_of(places.rank_of(expert)));
    }
    bytes.pairs += distinct(nodes);
    records += distinct(sums);
  }
  bytes.rows = bytes.pairs * abi::far_row_bytes(kit::dispatch_row_bytes(plan.params()), plan.topk);
  bytes.asks = bytes.pairs * abi::far_ask_bytes(plan.topk);
  bytes.sums = records * sum_bytes(plan);
  for (std::uint32_t node = 0; node < plan.nodes; ++node) {
    if (node != own) bytes.announcements += announcement_bytes(plan, places.ranks_of(node));
  }
  return bytes;
}

}  // namespace epd::bench
