// epctl doctor: facts are gathered in one place and judged in another, so that rules can be tested
// with any facts.
#pragma once

#include "arguments.h"
#include "socket.h"

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>
#include "epd/v1/control.pb.h"

namespace epd::ctl {

inline constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};

struct HostFacts {
  unsigned cores = 0;            // on which this process may run
  double cpu_quota = 0;          // cores' worth of time that the control group grants; 0: no limit
  std::uint64_t open_files = 0;  // soft limit of this process
  std::uint64_t open_files_hard = 0;
  std::uint64_t locked_bytes = 0;  // likewise
  std::string memfd_error;         // empty: a sealed memfd can be made and mapped
  std::string shmem_huge;          // "never", "advise", ...; empty: the kernel has no such setting
  std::uint64_t memory_bytes = 0;  // 0: unknown
  std::uint64_t available_bytes = 0;
  std::uint64_t swap_bytes = 0;
};

struct DaemonFacts {
  std::string control_path;
  SocketFile control_file;
  std::optional<Failure> failure;  // of the calls below; then they are empty
  std::uint64_t answer_us = 0;     // of GetVersion, connecting included
  v1::GetVersionResponse version;
  v1::GetStatusResponse status;
  std::string attach_path;  // empty: not known
  SocketFile attach_file;
  // Soft limit of the daemon process; no value if /proc does not tell.
  std::optional<std::uint64_t> open_files;
};

// Facts about one host:port that the cluster's configuration or a node names.
struct PortFacts {
  std::string what;     // "coordinator", "node node-b"
  std::string address;  // "node-b:7410"
  std::string error;    // why the host has no address, or nobody takes a connection; empty: somebody does
  bool resolved = false;
};

struct ClusterFacts {
  v1::ListNodesResponse nodes;
  std::vector<PortFacts> ports;
  v1::ListFarEnginesResponse network;
  std::set<std::string> interfaces;  // of this machine: "eth0", "mlx5_0"
};

enum class Level { kOk, kWarn, kFail };

struct Check {
  Level level = Level::kOk;
  std::string name;  // stable: "attach_socket", "device host:0"
  std::string text;
  std::string advice;  // empty if OK
};

inline Check ok(std::string name, std::string text) {
  return {Level::kOk, std::move(name), std::move(text), ""};
}
inline Check warn(std::string name, std::string text, std::string advice) {
  return {Level::kWarn, std::move(name), std::move(text), std::move(advice)};
}
inline Check fail(std::string name, std::string text, std::string advice) {
  return {Level::kFail, std::move(name), std::move(text), std::move(advice)};
}

HostFacts probe_host();
// Soft limit of open files of the process `pid`; no value unless it is named epd.
std::optional<std::uint64_t> open_files_of(std::int32_t pid);

std::vector<Check> judge_daemon(const DaemonFacts& daemon, const v1::GetVersionResponse& own);
std::vector<Check> judge_devices(const v1::GetStatusResponse& status);
// Warns if host devices are served because no GPU was found; else empty.
std::vector<Check> judge_choice(const v1::GetConfigResponse& config, const DaemonFacts& daemon);
// Empty if the daemon serves no GPU.
std::vector<Check> judge_gpus(const v1::GetStatusResponse& status);
// Looks whether the coordinator and the nodes can be reached from here; each for a second at most.
std::vector<PortFacts> probe_ports(const v1::ListNodesResponse& nodes);
std::set<std::string> probe_interfaces();
std::vector<Check> judge_cluster(const ClusterFacts& cluster);
// Judges the network between nodes by the engines' reports.
std::vector<Check> judge_network(const ClusterFacts& cluster);
// Warns of groups whose calls name memory that the engines don't reach; else empty.
std::vector<Check> judge_rows(const v1::ListGroupsResponse& groups);
// `status` is empty if no daemon answers.
std::vector<Check> judge_host(const HostFacts& host, const v1::GetStatusResponse& status);

}  // namespace epd::ctl
