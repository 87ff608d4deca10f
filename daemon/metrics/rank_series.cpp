#include "families.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include "epd/v1/control.pb.h"

namespace epd::metrics {
namespace {

constexpr double kSecondsOfUs = 1e-6;
constexpr double kHalfLifeNs = 300e9;

}  // namespace

RankSeries::Counts RankSeries::counts_of(const v1::GroupWaits& waits, int rank) {
  const v1::RankWaits& of = waits.ranks(rank);
  return {of.waited_for_ready_us(), of.waited_for_arrived_us(), of.last_arrivals(), of.rows()};
}

// A rank's counters start at 0 again if it has left and come back.
void RankSeries::add_news(Counts& sum, const Counts& before, const Counts& now) {
  const auto add = [&](std::uint64_t Counts::*count) {
    sum.*count += now.*count >= before.*count ? now.*count - before.*count : now.*count;
  };
  add(&Counts::ready_us);
  add(&Counts::arrived_us);
  add(&Counts::last_arrivals);
  add(&Counts::rows);
}

std::vector<std::size_t> RankSeries::told_ranks(const Group& group) const {
  std::vector<std::size_t> ranks(group.ranks.size());
  std::iota(ranks.begin(), ranks.end(), std::size_t{0});
  if (ranks.size() <= max_ranks_) return ranks;
  std::stable_sort(ranks.begin(), ranks.end(), [&](std::size_t a, std::size_t b) {
    return group.ranks[a].waited_us > group.ranks[b].waited_us;
  });
  ranks.resize(max_ranks_);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void RankSeries::take(Group& group, const v1::GroupWaits& waits) const {
  const std::uint64_t now_ns = clock_.now_ns();
  const double fade =
      std::exp2(-static_cast<double>(now_ns - std::exchange(group.looked_ns, now_ns)) / kHalfLifeNs);
  group.ranks.resize(static_cast<std::size_t>(waits.ranks_size()));
  std::vector<Counts> news(group.ranks.size());
  for (std::size_t i = 0; i < group.ranks.size(); ++i) {
    Rank& rank = group.ranks[i];
    const Counts now = counts_of(waits, static_cast<int>(i));
    add_news(news[i], rank.seen, now);
    rank.seen = now;
    rank.here = !waits.ranks(static_cast<int>(i)).device().empty();
    rank.waited_us = rank.waited_us * fade + static_cast<double>(news[i].ready_us + news[i].arrived_us);
    rank.rows = rank.rows * fade + static_cast<double>(news[i].rows);
  }
  std::vector<bool> told(group.ranks.size());
  for (const std::size_t i : told_ranks(group)) told[i] = true;
  for (std::size_t i = 0; i < group.ranks.size(); ++i)
    add_news(told[i] ? group.ranks[i].told : group.other, {}, news[i]);
}

void RankSeries::tell_counts(Families& out, const Labels& labels, const Counts& counts) {
  const char* waited = "Time that the other ranks of this node have waited for the rank's signal.";
  out.counter("epd_rank_waited_for_seconds_total", waited, with(labels, "signal", "ready"),
              static_cast<double>(counts.ready_us) * kSecondsOfUs);
  out.counter("epd_rank_waited_for_seconds_total", waited, with(labels, "signal", "arrived"),
              static_cast<double>(counts.arrived_us) * kSecondsOfUs);
  out.counter("epd_rank_last_arrivals_total",
              "Operations that the rank has announced as the last one. Host devices only.", labels,
              static_cast<double>(counts.last_arrivals));
  out.counter("epd_rank_rows_total", "Rows that the rank has received by dispatches.", labels,
              static_cast<double>(counts.rows));
}

// Tells all pairs from the start, so that the first wait of each is an increase.
void RankSeries::tell_pairs(Families& out, const Labels& labels, const v1::GroupWaits& waits) {
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> us;
  for (const v1::PairWait& pair : waits.pairs())
    us[{pair.rank(), pair.peer()}] = pair.ready_us() + pair.arrived_us();
  for (const v1::RankWaits& rank : waits.ranks()) {
    if (rank.device().empty()) continue;
    const Labels of_rank = with(labels, "rank", std::to_string(rank.rank()));
    for (const v1::RankWaits& peer : waits.ranks()) {
      if (peer.rank() == rank.rank()) continue;
      const auto found = us.find({rank.rank(), peer.rank()});
      out.counter("epd_rank_wait_seconds_total", "Time that the rank has waited for the peer.",
                  with(of_rank, "peer", std::to_string(peer.rank())),
                  found == us.end() ? 0 : static_cast<double>(found->second) * kSecondsOfUs);
    }
  }
}

void RankSeries::tell_ratio(Families& out, const Labels& labels, const Group& group) {
  double sum = 0;
  double most = 0;
  std::size_t ranks = 0;
  for (const Rank& rank : group.ranks) {
    if (!rank.here) continue;
    ++ranks;
    sum += rank.rows;
    most = std::max(most, rank.rows);
  }
  if (sum == 0) return;
  out.gauge(
      "epd_group_rows_ratio",
      "Recent rows: the most of a rank, divided by the mean of this node's ranks. Rows of five minutes ago "
      "count half.",
      labels, most * static_cast<double>(ranks) / sum);
}

void RankSeries::tell(Families& out, const v1::GetWaitsResponse& waits, std::size_t max_groups) {
  std::map<std::uint64_t, Group> groups;
  for (const v1::GroupWaits& of : waits.groups()) {
    if (groups.size() == max_groups) break;
    const auto known = groups_.find(of.group_id());
    Group& group = groups[of.group_id()];
    if (known != groups_.end()) group = std::move(known->second);
    take(group, of);
    const Labels labels = {{"group", of.name()}, {"group_id", std::to_string(of.group_id())}};
    for (const std::size_t rank : told_ranks(group))
      tell_counts(out, with(labels, "rank", std::to_string(rank)), group.ranks[rank].told);
    if (group.ranks.size() > max_ranks_) {
      tell_counts(out, with(labels, "rank", "other"), group.other);
    } else {
      tell_pairs(out, labels, of);
    }
    tell_ratio(out, labels, group);
  }
  groups_ = std::move(groups);  // ended groups are forgotten
}

}  // namespace epd::metrics
