#include "far/span.h"

#include <algorithm>

namespace epd::far {

Span::Span(const View& view)
    : nodes_(view.nodes.begin(), view.nodes.end()),
      places_(view.nodes.size(), kNoRank),
      node_(view.node),
      sum_ranks_(view.sum_ranks == 0 ? std::max<std::uint32_t>(1, num_ranks()) : view.sum_ranks) {
  for (std::uint32_t rank = 0; rank < num_ranks(); ++rank) {
    if (!view.masked.empty() && view.masked[rank] != 0) continue;
    auto at = std::find_if(table_.begin(), table_.end(),
                           [&](const Node& node) { return node.number >= nodes_[rank]; });
    if (at == table_.end() || at->number != nodes_[rank]) at = table_.insert(at, {nodes_[rank], {}});
    places_[rank] = static_cast<std::uint32_t>(at->ranks.size());
    at->ranks.push_back(rank);
  }
  for (const bool behind : {true, false}) {
    for (const Node& node : table_) {
      if (node.number != node_ && (node.number > node_) == behind) far_nodes_.push_back(node.number);
    }
  }
  whole_.assign(num_domains(), 1);
  std::vector<std::uint32_t> first(num_domains(), kNoRank);
  for (std::uint32_t rank = 0; rank < num_ranks(); ++rank) {
    if (!active(rank)) continue;
    std::uint32_t& other = first[domain_of(rank)];
    if (other == kNoRank) other = rank;
    if (nodes_[other] != nodes_[rank]) whole_[domain_of(rank)] = 0;
  }
}

std::span<const std::uint32_t> Span::ranks_of(std::uint32_t node) const {
  for (const Node& other : table_) {
    if (other.number == node) return other.ranks;
  }
  return {};
}

std::uint32_t Span::gateway(std::uint32_t rank, std::uint32_t node) const {
  const std::span<const std::uint32_t> there = ranks_of(node);
  return there[places_[rank] % there.size()];
}

std::vector<std::uint32_t> Span::served_by(std::uint32_t gateway) const {
  std::vector<std::uint32_t> served;
  for (std::uint32_t rank = 0; rank < num_ranks(); ++rank) {
    if (active(rank) && !is_near(rank) && this->gateway(rank, node_) == gateway) served.push_back(rank);
  }
  return served;
}

}  // namespace epd::far
