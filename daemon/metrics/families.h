// What Prometheus is told, made from what the control plane says. No HTTP here.
#pragma once

#include "common/status.h"
#include "supervisor/control_facade.h"

#include "epd/v1/control.pb.h"

#include <prometheus/metric_family.h>
#include <cstddef>
#include <vector>

namespace epd::metrics {

// Taken one after the other, so that a group may be in one list and not in another.
struct Snapshot {
  v1::DaemonStatus daemon;
  v1::ListDevicesResponse devices;
  v1::ListGroupsResponse groups;
  v1::ListOperationsResponse operations;
  v1::GetStatisticsResponse statistics;
};
Result<Snapshot> take_snapshot(supervisor::ControlFacade& facade);

// Groups in the order of their ids; those behind the first `max_groups` are summed up as group "other".
std::vector<prometheus::MetricFamily> families_of(const Snapshot& snapshot, std::size_t max_groups);
// When the supervisor has not answered.
std::vector<prometheus::MetricFamily> families_of_silence();

}  // namespace epd::metrics
