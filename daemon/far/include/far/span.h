// Tables of ranks and nodes. They follow from a group's view alone, so they are equal on every node. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace epd::far {

inline constexpr std::uint32_t kNoRank = ~std::uint32_t{0};

class Span {
 public:
  struct View {
    std::span<const std::uint32_t> nodes;  // [R] the number of each rank's node; any numbers
    std::span<const std::uint8_t> masked;  // [R] not 0: the rank is not active. Empty: all are
    std::uint32_t node = 0;                // this one
    std::uint32_t sum_ranks = 0;           // ranks of a sum domain; 0: all
  };
  explicit Span(const View& view);

  std::uint32_t num_ranks() const { return static_cast<std::uint32_t>(nodes_.size()); }
  std::uint32_t node() const { return node_; }
  std::uint32_t node_of(std::uint32_t rank) const { return nodes_[rank]; }
  bool active(std::uint32_t rank) const { return places_[rank] != kNoRank; }
  bool is_near(std::uint32_t rank) const { return nodes_[rank] == node_; }
  // The active ranks of a node, ascending; none if the view has no such node.
  std::span<const std::uint32_t> ranks_of(std::uint32_t node) const;
  std::span<const std::uint32_t> near_ranks() const { return ranks_of(node_); }
  // Other nodes with active ranks: ascending from the one after this, then from the lowest. So the nodes do
  // not all send to the same one first.
  std::span<const std::uint32_t> far_nodes() const { return far_nodes_; }

  // The rank of a node that gets everything from `rank` to that node. `rank` is active and on another node,
  // which has active ranks.
  std::uint32_t gateway(std::uint32_t rank, std::uint32_t node) const;
  // The far ranks whose gateway at this node is `gateway`, ascending.
  std::vector<std::uint32_t> served_by(std::uint32_t gateway) const;

  std::uint32_t num_domains() const { return (num_ranks() + sum_ranks_ - 1) / sum_ranks_; }
  std::uint32_t domain_of(std::uint32_t rank) const { return rank / sum_ranks_; }
  std::uint32_t sum_ranks() const { return sum_ranks_; }
  // Whether all active ranks of the domain are on one node, which then forms its sums. Domains without active
  // ranks are whole.
  bool is_whole(std::uint32_t domain) const { return whole_[domain] != 0; }

 private:
  struct Node {
    std::uint32_t number;
    std::vector<std::uint32_t> ranks;
  };

  std::vector<std::uint32_t> nodes_;   // [R]
  std::vector<std::uint32_t> places_;  // [R] among the active ranks of its node; kNoRank: not active
  std::vector<Node> table_;            // nodes with active ranks, ascending
  std::vector<std::uint32_t> far_nodes_;
  std::vector<std::uint8_t> whole_;  // [domains]
  std::uint32_t node_;
  std::uint32_t sum_ranks_;
};

}  // namespace epd::far
