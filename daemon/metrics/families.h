#pragma once

#include "base/call_times.h"
#include "base/clock.h"
#include "base/utf8.h"
#include "common/status.h"
#include "epd/v1/control.pb.h"
#include "supervisor/control_facade.h"

#include <prometheus/metric_family.h>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace epd::metrics {

using Labels = std::vector<std::pair<std::string, std::string>>;

// Families in the order in which they are first used.
class Families {
 public:
  void gauge(const char* name, const char* help, const Labels& labels, double value) {
    metric(name, help, prometheus::MetricType::Gauge, labels).gauge.value = value;
  }
  void counter(const char* name, const char* help, const Labels& labels, double value) {
    metric(name, help, prometheus::MetricType::Counter, labels).counter.value = value;
  }
  prometheus::ClientMetric::Histogram& histogram(const char* name, const char* help, const Labels& labels) {
    return metric(name, help, prometheus::MetricType::Histogram, labels).histogram;
  }
  std::vector<prometheus::MetricFamily> take() && { return std::move(families_); }

 private:
  prometheus::ClientMetric& metric(const char* name, const char* help, prometheus::MetricType type,
                                   const Labels& labels) {
    const auto [found, is_new] = index_.try_emplace(name, families_.size());
    if (is_new) families_.push_back({name, help, type, {}});
    prometheus::ClientMetric& metric = families_[found->second].metric.emplace_back();
    for (const auto& [label, value] : labels) metric.label.push_back({label, clean_text(value)});
    return metric;
  }

  std::vector<prometheus::MetricFamily> families_;
  std::map<std::string_view, std::size_t> index_;
};

inline Labels with(Labels labels, const char* name, const std::string& value) {
  labels.emplace_back(name, value);
  return labels;
}

// The resources that this process, the supervisor, uses, from /proc.
struct ProcessUse {
  double cpu_seconds = 0;
  double start_seconds = 0;  // Unix time
  std::uint64_t resident_bytes = 0;
  std::uint64_t open_fds = 0;
  std::uint64_t max_fds = 0;
};
// Values that /proc does not show are 0.
ProcessUse own_use();

// Series of single ranks: how long the others have waited for them, how often they were last, how many rows
// they received.
// A group may have 1024 ranks, and the number of series is limited. So in a group with more than `max_ranks`
// only those are told for which the others have waited most recently, and the rest together as rank "other".
// This selection changes, and a counter must not fall. So each scrape adds the increase since the previous
// one to the rank's own series if it is told now, otherwise to "other". For that the numbers of the previous
// scrape are kept here.
class RankSeries {
 public:
  // The clock outlives it.
  RankSeries(std::size_t max_ranks, const Clock& clock) : max_ranks_(max_ranks), clock_(clock) {}

  // Tells the first `max_groups` groups by id.
  void tell(Families& out, const v1::GetWaitsResponse& waits, std::size_t max_groups);

 private:
  struct Counts {
    std::uint64_t ready_us = 0;
    std::uint64_t arrived_us = 0;
    std::uint64_t last_arrivals = 0;
    std::uint64_t rows = 0;
  };
  struct Rank {
    Counts seen;  // at the scrape before
    Counts told;
    // Sums over the last minutes; older values count less and less.
    double waited_us = 0;
    double rows = 0;
    bool here = false;
  };
  struct Group {
    std::uint64_t looked_ns = 0;
    std::vector<Rank> ranks;
    Counts other;
  };

  static Counts counts_of(const v1::GroupWaits& waits, int rank);
  static void add_news(Counts& sum, const Counts& before, const Counts& now);
  void take(Group& group, const v1::GroupWaits& waits) const;
  std::vector<std::size_t> told_ranks(const Group& group) const;
  static void tell_counts(Families& out, const Labels& labels, const Counts& counts);
  static void tell_pairs(Families& out, const Labels& labels, const v1::GroupWaits& waits);
  static void tell_ratio(Families& out, const Labels& labels, const Group& group);

  const std::size_t max_ranks_;
  const Clock& clock_;
  std::map<std::uint64_t, Group> groups_;
};

// Answers of the control plane. They are taken one after the other, so a group may be in one list and not in
// another.
struct Snapshot {
  v1::GetStatusResponse status;
  v1::ListGroupsResponse groups;
  v1::ListOperationsResponse operations;
  v1::GetStatisticsResponse statistics;
  v1::GetWaitsResponse waits;
  v1::ListSessionsResponse sessions;
  v1::ListFarEnginesResponse network;  // empty if the daemon is in no cluster
  // Not from the facade.
  CallTimes::All calls;  // of the control plane
  ProcessUse process;
  std::uint64_t log_lines_lost = 0;
};
// Pairs of ranks are included for groups that have at most `max_ranks`.
Result<Snapshot> take_snapshot(supervisor::ControlFacade& facade, std::uint32_t max_ranks);

// Tells groups in the order of their ids. Those beyond the first `max_groups` are summed up as group "other".
std::vector<prometheus::MetricFamily> families_of(const Snapshot& snapshot, std::size_t max_groups,
                                                  RankSeries& ranks);
// The families if the supervisor has not answered.
std::vector<prometheus::MetricFamily> families_of_silence();

}  // namespace epd::metrics
