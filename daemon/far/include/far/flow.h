#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <span>
#include <vector>

namespace epd::far {

// Tables of ranks and nodes. They follow from a group's view alone, so they are equal on every node. Pure.
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

// Windows of batches between two ranks. Pure.
//
// A batch takes a credit when it is handed to the port. The receiver gives it back when it has forwarded
// (rows), served (asks) or added up (sums) the batch. Each pair has one window for rows and asks and another
// for sums: asks in both directions could fill a common one, and leave only when sums can.

// The sender's side. Operations take credits in order: operation i + 1 takes none before operation i has
// taken all of its. Otherwise a later operation could hold what an earlier one needs, and wait for that one.
class Window {
 public:
  explicit Window(std::uint32_t batches) : batches_(batches), credits_(batches) {}

  // Operations enter in the order of their tags.
  void enter(std::uint64_t tag) { order_.push_back(tag); }
  // The operation has taken all its credits, or has ended.
  void leave(std::uint64_t tag);
  bool in_turn(std::uint64_t tag) const { return !order_.empty() && order_.front() == tag; }
  // The number of credits that the operation may take now.
  std::uint32_t available(std::uint64_t tag) const { return in_turn(tag) ? credits_ : 0; }
  void take(std::uint64_t tag);
  // False, and nothing changes: fewer are out.
  bool give_back(std::uint32_t credits);

  std::uint32_t credits() const { return credits_; }
  std::uint32_t batches() const { return batches_; }

 private:
  std::uint32_t batches_;
  std::uint32_t credits_;
  std::deque<std::uint64_t> order_;  // operations that have not taken all
};

// The receiver's side.
class Debt {
 public:
  explicit Debt(std::uint32_t batches) : batches_(batches) {}

  // A batch has come. False: the sender has no credit for it.
  bool receive();
  // A batch is done with, so its credit is owed.
  void settle(std::uint64_t now_ns);
  // Whether credits need a message of their own: half the window is owed, or some for kPatienceNs.
  bool is_due(std::uint64_t now_ns) const;
  // When is_due() becomes true if nothing else happens; 0: nothing is owed.
  std::uint64_t due_ns() const { return owed_ == 0 ? 0 : since_ns_ + kPatienceNs; }
  // Takes the owed credits for a message that goes anyway.
  std::uint16_t take();

  std::uint32_t owed() const { return owed_; }
  std::uint32_t held() const { return held_; }

  static constexpr std::uint64_t kPatienceNs = 50'000;

 private:
  std::uint32_t batches_;
  std::uint32_t held_ = 0;  // have come and are not done with
  std::uint32_t owed_ = 0;
  std::uint64_t since_ns_ = 0;
};

// The numbers of messages that have come from one engine in an epoch, in any order.
class Sequence {
 public:
  // The most that a number may be beyond the first missing one.
  static constexpr std::uint64_t kMostAhead = 1u << 16;

  // False: the number has come before or is too far ahead, or its sender has begun the epoch again since.
  // `began_ns`: when the sender began. An engine that begins an epoch again counts from 1.
  bool take(std::uint64_t began_ns, std::uint64_t number, std::uint64_t now_ns);
  // Since when a number has been missing, while later ones have come; 0: none is missing.
  std::uint64_t gap_since_ns() const { return gap_since_ns_; }
  // All numbers below this one have come.
  std::uint64_t next() const { return next_; }

 private:
  std::uint64_t began_ns_ = 0;
  std::uint64_t next_ = 1;
  std::set<std::uint64_t> ahead_;
  std::uint64_t gap_since_ns_ = 0;
};

}  // namespace epd::far
