#include "waits.h"

#include "proto/waits.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include "epd/v1/control.pb.h"

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kUsNs = 1000;

std::uint64_t value(const std::atomic<std::uint64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

struct Pair {
  std::uint32_t rank = 0;
  std::uint32_t peer = 0;
  WaitSum sum;

  std::uint64_t total() const { return sum.ready_ns + sum.arrived_ns; }
};

WaitSum wait_of(const abi::PeerWait& peer) {
  return {value(peer.ready_ns), value(peer.arrived_ns)};
}

void add(WaitSum& sum, const WaitSum& more) {
  sum.ready_ns += more.ready_ns;
  sum.arrived_ns += more.arrived_ns;
}

// Reads a board. Processes that map it may write there.
abi::RankWaits waits_in(const Mapping& board, const abi::GroupShape& shape) {
  return abi::RankWaits::in(board.bytes(), shape);
}

// The longest ones, if there are too many.
void add_pairs(v1::GroupWaits& message, std::vector<Pair> pairs, std::size_t most) {
  if (pairs.size() > most) {
    message.set_pairs_left_out(pairs.size() - most);
    std::nth_element(pairs.begin(), pairs.begin() + static_cast<std::ptrdiff_t>(most), pairs.end(),
                     [](const Pair& a, const Pair& b) { return a.total() > b.total(); });
    pairs.resize(most);
    std::sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) {
      return std::tuple(a.rank, a.peer) < std::tuple(b.rank, b.peer);
    });
  }
  for (const Pair& pair : pairs) {
    v1::PairWait& out = *message.add_pairs();
    out.set_rank(pair.rank);
    out.set_peer(pair.peer);
    out.set_ready_us(pair.sum.ready_ns / kUsNs);
    out.set_arrived_us(pair.sum.arrived_ns / kUsNs);
  }
}

void fill(v1::GroupWaits& message, const WaitingGroup& group, const WaitsWanted& wanted) {
  const std::uint32_t ranks = group.shape.num_ranks;
  message.set_group_id(group.id);
  message.set_name(group.name);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) message.add_ranks()->set_rank(rank);
  std::vector<WaitSum> waited_for = group.gone;
  waited_for.resize(ranks);
  std::vector<Pair> pairs;
  for (const WaitingRank& of : group.ranks) {
    const abi::RankWaits waits = waits_in(*of.board, group.shape);
    v1::RankWaits& out = *message.mutable_ranks(static_cast<int>(of.rank));
    WaitSum own;
    for (std::uint32_t peer = 0; peer < ranks; ++peer) {
      const WaitSum sum = wait_of(waits.peers[peer]);
      add(own, sum);
      add(waited_for[peer], sum);
      if (ranks <= wanted.max_ranks && sum.ready_ns + sum.arrived_ns != 0)
        pairs.push_back({of.rank, peer, sum});
    }
    out.set_device(of.device);
    out.set_operations(value(waits.counts->operations));
    out.set_last_arrivals(value(waits.counts->last_arrivals));
    out.set_rows(value(waits.counts->rows));
    out.set_waited_us((own.ready_ns + own.arrived_ns) / kUsNs);
  }
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    v1::RankWaits& out = *message.mutable_ranks(static_cast<int>(rank));
    out.set_waited_for_ready_us(waited_for[rank].ready_ns / kUsNs);
    out.set_waited_for_arrived_us(waited_for[rank].arrived_ns / kUsNs);
  }
  add_pairs(message, std::move(pairs), wanted.max_pairs);
}

// Pairs are in the order of rank and peer.
v1::PairWait& pair_of(v1::GroupWaits& group, std::uint32_t rank, std::uint32_t peer) {
  for (v1::PairWait& pair : *group.mutable_pairs()) {
    if (pair.rank() == rank && pair.peer() == peer) return pair;
  }
  group.add_pairs();
  int at = group.pairs_size() - 1;
  for (; at > 0 && std::pair(group.pairs(at - 1).rank(), group.pairs(at - 1).peer()) > std::pair(rank, peer);
       --at)
    group.mutable_pairs()->SwapElements(at, at - 1);
  v1::PairWait& pair = *group.mutable_pairs(at);
  pair.set_rank(rank);
  pair.set_peer(peer);
  return pair;
}

void add_in_progress(v1::GroupWaits& group, const v1::Operation& op, bool with_pairs) {
  const auto peer = static_cast<std::uint32_t>(op.waiting_for());
  const auto ranks = static_cast<std::uint32_t>(group.ranks_size());
  if (op.rank() >= ranks || peer >= ranks) return;
  const std::uint64_t us = op.waiting_us();
  v1::RankWaits& own = *group.mutable_ranks(static_cast<int>(op.rank()));
  own.set_waited_us(own.waited_us() + us);
  v1::RankWaits& other = *group.mutable_ranks(static_cast<int>(peer));
  const bool ready = op.stage() == v1::OPERATION_STAGE_WAIT_READY;
  if (ready) {
    other.set_waited_for_ready_us(other.waited_for_ready_us() + us);
  } else {
    other.set_waited_for_arrived_us(other.waited_for_arrived_us() + us);
  }
  if (!with_pairs) return;
  v1::PairWait& pair = pair_of(group, op.rank(), peer);
  if (ready) {
    pair.set_ready_us(pair.ready_us() + us);
  } else {
    pair.set_arrived_us(pair.arrived_us() + us);
  }
}

}  // namespace

void add_in_progress(v1::GetWaitsResponse& waits, const v1::ListOperationsResponse& operations,
                     const WaitsWanted& wanted) {
  for (const v1::Operation& op : operations.operations()) {
    if (op.waiting_for() < 0 || !op.device().starts_with("host:")) continue;
    for (v1::GroupWaits& group : *waits.mutable_groups()) {
      if (group.group_id() == op.group_id())
        add_in_progress(group, op, static_cast<std::uint32_t>(group.ranks_size()) <= wanted.max_ranks);
    }
  }
}

void add_waits(std::vector<WaitSum>& sums, const Mapping& board, const abi::GroupShape& shape) {
  const abi::RankWaits waits = waits_in(board, shape);
  for (std::size_t peer = 0; peer < sums.size(); ++peer) add(sums[peer], wait_of(waits.peers[peer]));
}

v1::GetWaitsResponse message_of(const std::vector<WaitingGroup>& groups, const WaitsWanted& wanted) {
  v1::GetWaitsResponse message;
  for (const WaitingGroup& group : groups) fill(*message.add_groups(), group, wanted);
  return message;
}

}  // namespace epd::supervisor
