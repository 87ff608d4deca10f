// What Prometheus is told, made from what the control plane says. No HTTP here.
#pragma once

#include "base/call_times.h"
#include "common/status.h"
#include "process_use.h"
#include "rank_series.h"
#include "supervisor/control_facade.h"

#include "epd/v1/control.pb.h"

#include <prometheus/metric_family.h>
#include <cstddef>
#include <vector>

namespace epd::metrics {

// Taken one after the other, so that a group may be in one list and not in another.
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
// Pairs of ranks are there of groups that have at most `max_ranks`.
Result<Snapshot> take_snapshot(supervisor::ControlFacade& facade, std::uint32_t max_ranks);

// Groups in the order of their ids; those behind the first `max_groups` are summed up as group "other".
std::vector<prometheus::MetricFamily> families_of(const Snapshot& snapshot, std::size_t max_groups,
                                                  RankSeries& ranks);
// When the supervisor has not answered.
std::vector<prometheus::MetricFamily> families_of_silence();

}  // namespace epd::metrics
