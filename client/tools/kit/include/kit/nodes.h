#pragma once

#include "common/fd.h"
#include "kit/daemon.h"

#include <sys/types.h>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace epd::kit {

// Counters of a node's interface.
struct Traffic {
  std::uint64_t sent_bytes = 0;  // with the link's headers
  std::uint64_t sent_packets = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t received_packets = 0;
};

// A network of emulated nodes on this machine. Each node has a network and an IPC namespace of its own, in
// which it sees one interface. A bridge in one more namespace joins the interfaces. Nothing of it has a name
// outside: the kernel removes all of it with its last process and its last open descriptor.
class NodeNetwork {
 public:
  static constexpr const char* kInterface = "eth0";
  static constexpr std::uint32_t kMaxNodes = 64;

  // "", or what is missing on this machine. Makes a network and removes it.
  static std::string why_not();
  // `rate` limits what each node sends, in tc's words: "4gbit"; empty: no limit. Throws ToolError. A process
  // that may not make namespaces becomes root of a user namespace first, and stays so. It must have one
  // thread.
  explicit NodeNetwork(std::uint32_t nodes, const std::string& rate = "");

  std::uint32_t size() const { return static_cast<std::uint32_t>(nodes_.size()); }
  std::string address(std::uint32_t node) const;
  // Moves a process, between its fork and exec, to the node, with a /sys of its own. Returns "" or what
  // failed.
  const char* enter(std::uint32_t node) const;
  // May be called in any process forked from this one.
  Traffic traffic(std::uint32_t node) const;
  // Connect or disconnect the cable between the node and the bridge.
  void plug(std::uint32_t node);
  void unplug(std::uint32_t node);

 private:
  struct Namespaces {
    UniqueFd network, ipc;
    UniqueFd counters;  // /proc/net/dev there
  };
  static Namespaces make_namespaces();
  void add_node(const std::string& rate);
  void run_in(const Namespaces& place, const std::vector<std::string>& words) const;

  Namespaces bridge_;
  std::vector<Namespaces> nodes_;
};

// Bits per second of a rate such as "4gbit" or "500mbit"; 0 for an empty one. Throws ToolError for any other
// text.
double bits_per_second(const std::string& rate);

struct NodesOptions {
  std::string program{};      // path of epd; empty: beside this executable
  std::uint32_t nodes = 1;    // 1: a daemon without a cluster, and no network
  std::uint32_t devices = 1;  // host devices of each node
  std::uint32_t sms = 0;      // of each device; 0: the daemon's default
  std::string rate{};         // limit of what each node sends: "4gbit"; empty: none
  std::string check{};        // network.check; empty: the daemon's default
};

// Where a rank runs. Ranks fill the nodes in order; where they can't be equal, the first have one more.
struct RankPlace {
  std::uint32_t node = 0;
  std::uint32_t device = 0;
};
RankPlace place_of(std::uint32_t rank, std::uint32_t ranks, std::uint32_t nodes);

// Daemons of the tool's own: one, or a cluster with each daemon on a node of a NodeNetwork.
class OwnNodes {
 public:
  // "", or what several nodes would need and this machine lacks.
  static std::string why_not();
  // Returns when all nodes are up. Throws ToolError.
  explicit OwnNodes(const NodesOptions& options);
  ~OwnNodes();
  OwnNodes(const OwnNodes&) = delete;
  OwnNodes& operator=(const OwnNodes&) = delete;

  std::uint32_t size() const { return static_cast<std::uint32_t>(daemons_.size()); }
  const OwnDaemon& daemon(std::uint32_t node) const { return *daemons_[node]; }
  std::vector<pid_t> pids() const;
  // Only with more than one node.
  const NodeNetwork& network() const { return *network_; }
  NodeNetwork& network() { return *network_; }
  // Bytes that the nodes have sent to each other, with the links' headers; 0 with one node.
  std::uint64_t link_bytes() const;
  // The last log lines of all daemons.
  std::string log_tail() const;
  // "" after clean exits, else what happened.
  std::string stop();

 private:
  void make_certificates();
  std::string cluster_settings(std::uint32_t node) const;
  void await_all() const;

  const std::string check_;
  std::optional<NodeNetwork> network_;
  std::string directory_;  // the certificates
  std::vector<std::unique_ptr<OwnDaemon>> daemons_;
};

}  // namespace epd::kit
