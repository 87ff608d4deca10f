// The control plane's view of the supervisor: its state as messages.
#pragma once

#include "cluster/cluster.h"
#include "gpu_work.h"
#include "lifecycle.h"
#include "network_watch.h"
#include "operator_settings.h"
#include "rooms.h"
#include "supervisor/config.h"
#include "supervisor/control_facade.h"
#include "waits.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace epd::v1 {
class ClusterStatus;
class CudaDevice;
class DaemonStatus;
class Operation;
class Wait;
}  // namespace epd::v1

namespace epd::supervisor {

class ControlReads {
 public:
  struct Parts {
    const OperatorSettings& settings;
    const GpuWork& gpu_work;
    const Lifecycle& lifecycle;
    const NetworkWatch& network;
    const std::unique_ptr<cluster::Cluster>& cluster;          // null: the daemon is in no cluster
    const std::optional<cluster::Settings>& cluster_settings;  // as at start; for any thread
  };
  ControlReads(const Rooms& rooms, const Parts& parts);

  v1::DaemonStatus daemon_status() const;
  std::string boot_id() const;
  HealthFacts health() const;
  v1::ListDevicesResponse list_devices() const;
  v1::ListSessionsResponse list_sessions() const;
  v1::ListGroupsResponse list_groups() const;
  Result<v1::ListNodesResponse> list_nodes() const;
  Result<v1::ListFarEnginesResponse> list_far_engines() const;
  std::vector<ConfigEntry> config_entries() const;
  // Returns all groups, or one, sorted by id.
  std::vector<WaitingGroup> waiting_groups(std::optional<std::uint64_t> group_id) const;
  // From any thread: asks /proc.
  static void mark_stopped_clients(v1::ListGroupsResponse& groups);
  // From any thread: reads the certificate files.
  void add_certificate(v1::ListNodesResponse& nodes) const;
  // For each device, in order of numbers: whether its engine is stopped.
  std::vector<bool> stopped_engines() const;
  // From any thread: these read only the engines' pages. Operations are not sorted yet.
  v1::ListOperationsResponse list_operations(const std::vector<bool>& stopped) const;
  v1::GetStatisticsResponse statistics() const;

  // In explain.cpp.
  Result<v1::GetOperationResponse> explain(std::uint64_t session_id, std::uint64_t ticket) const;

 private:
  // In users.cpp.
  void add_users(v1::ListSessionsResponse& list) const;
  void fill_cuda(v1::CudaDevice& message, std::uint32_t index) const;

  // In explain.cpp.
  v1::Wait wait_of(const membership::Group& group, std::uint32_t rank, const v1::Operation* its) const;
  std::string silent_engines(const membership::Group& group) const;
  Status no_such_operation(std::uint64_t session_id, std::uint64_t ticket) const;

  const Rooms& rooms_;
  const Parts parts_;
};

}  // namespace epd::supervisor
