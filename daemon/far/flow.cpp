#include "far/flow.h"

#include "common/status.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace epd::far {

// ---- span

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

// ---- flow

void Window::leave(std::uint64_t tag) {
  order_.erase(std::remove(order_.begin(), order_.end(), tag), order_.end());
}

void Window::take(std::uint64_t tag) {
  EPD_CHECK(available(tag) > 0);
  --credits_;
}

bool Window::give_back(std::uint32_t credits) {
  if (credits > batches_ - credits_) return false;
  credits_ += credits;
  return true;
}

bool Debt::receive() {
  if (held_ + owed_ >= batches_) return false;
  ++held_;
  return true;
}

void Debt::settle(std::uint64_t now_ns) {
  EPD_CHECK(held_ > 0);
  --held_;
  if (owed_++ == 0) since_ns_ = now_ns;
}

bool Debt::is_due(std::uint64_t now_ns) const {
  return owed_ != 0 && (owed_ * 2 >= batches_ || now_ns >= due_ns());
}

std::uint16_t Debt::take() {
  const auto credits =
      static_cast<std::uint16_t>(std::min<std::uint32_t>(owed_, std::numeric_limits<std::uint16_t>::max()));
  owed_ -= credits;
  return credits;
}

// ---- sequence

bool Sequence::take(std::uint64_t began_ns, std::uint64_t number, std::uint64_t now_ns) {
  if (began_ns < began_ns_) return false;
  if (began_ns > began_ns_) {
    *this = Sequence();
    began_ns_ = began_ns;
  }
  if (number < next_ || number - next_ > kMostAhead) return false;
  if (number != next_) {
    if (!ahead_.insert(number).second) return false;
    if (gap_since_ns_ == 0) gap_since_ns_ = std::max<std::uint64_t>(1, now_ns);
    return true;
  }
  ++next_;
  if (ahead_.empty()) return true;
  while (!ahead_.empty() && *ahead_.begin() == next_) {
    ahead_.erase(ahead_.begin());
    ++next_;
  }
  gap_since_ns_ = ahead_.empty() ? 0 : std::max<std::uint64_t>(1, now_ns);
  return true;
}

}  // namespace epd::far
