// Owns the rooms and the parts of the supervisor, and connects them. Sessions and engines report events, the
// deciders decide, and orders are carried out. Everything runs on the loop.
#pragma once

#include "base/closer.h"
#include "base/quota.h"
#include "cluster/cluster.h"
#include "control_reads.h"
#include "device_list.h"
#include "engine_events.h"
#include "fleet.h"
#include "gpu_work.h"
#include "lifecycle.h"
#include "live_config.h"
#include "loop.h"
#include "member_memory_store.h"
#include "membership/deciders.h"
#include "memory_maps.h"
#include "network_watch.h"
#include "operator_commands.h"
#include "operator_settings.h"
#include "orders.h"
#include "removals.h"
#include "rooms.h"
#include "session/session_table.h"
#include "session_events.h"
#include "supervisor/supervisor.h"

#include <cstdint>
#include <memory>

namespace epd::supervisor {

class Node {
 public:
  // Objects that exist before the node and outlive it. `deadlines` is the loop's clock.
  struct Ground {
    Loop& loop;
    const Clock& clock;
    const Clock& deadlines;
    DaemonLife life;
  };
  Node(const Ground& ground, SupervisorOptions options, DeviceList devices);
  Status start();
  void run();

  Loop& loop() { return rooms_.loop; }
  Lifecycle& lifecycle() { return lifecycle_; }
  const ControlReads& reads() const { return reads_; }
  OperatorCommands& commands() { return commands_; }

 private:
  Status join_cluster();
  std::uint64_t turn();
  std::uint64_t turn_of_cluster();

  const SupervisorOptions options_;
  const DaemonLife life_;
  const Clock& deadlines_;
  LiveConfig config_;
  const DeviceList devices_;
  DescriptorBudget descriptors_;
  Closer closer_;

  // Each part knows the rooms, and only those parts that come before it.
  const Rooms rooms_;
  OperatorSettings settings_;
  Orders orders_;
  Removals removals_;
  GpuWork gpu_work_;
  MemoryMaps maps_;
  Lifecycle lifecycle_;
  SessionEvents session_events_;
  EngineEvents engine_events_;
  NetworkWatch network_watch_;
  std::unique_ptr<cluster::Cluster> cluster_;  // null: the daemon is in no cluster
  DaemonPhase told_cluster_ = DaemonPhase::kServing;
  ControlReads reads_;
  OperatorCommands commands_;

  // The rooms that report to parts. So they are made later and destroyed first.
  MemberMemoryStore memory_;
  membership::Deciders deciders_;
  session::SessionTable sessions_;
  EngineFleet fleet_;
};

}  // namespace epd::supervisor
