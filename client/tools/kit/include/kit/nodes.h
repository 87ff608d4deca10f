// Daemons of the tool's own: one, or those of a cluster, each on a node of a NodeNetwork.
#pragma once

#include "kit/daemon.h"
#include "kit/node_network.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace epd::kit {

struct NodesOptions {
  std::string program{};      // path of epd; empty: beside this executable
  std::uint32_t nodes = 1;    // 1: a daemon without a cluster, and no network
  std::uint32_t devices = 1;  // host devices of each
  std::uint32_t sms = 0;      // of each device; 0: the daemon's default
  std::string rate{};         // that each node sends at: "4gbit"; empty: as fast as it goes
  std::string check{};        // network.check; empty: the daemon's default
};

// Where a rank runs. Ranks fill the nodes in order; where they can't be equal, the first have one more.
struct RankPlace {
  std::uint32_t node = 0;
  std::uint32_t device = 0;
};
RankPlace place_of(std::uint32_t rank, std::uint32_t ranks, std::uint32_t nodes);

class OwnNodes {
 public:
  // "", or what several nodes lack here.
  static std::string why_not();
  // Returns when all nodes are up. Throws ToolError.
  explicit OwnNodes(const NodesOptions& options);
  ~OwnNodes();
  OwnNodes(const OwnNodes&) = delete;
  OwnNodes& operator=(const OwnNodes&) = delete;

  std::uint32_t size() const { return static_cast<std::uint32_t>(daemons_.size()); }
  const OwnDaemon& daemon(std::uint32_t node) const { return *daemons_[node]; }
  std::vector<pid_t> pids() const;
  // Only of more than one.
  const NodeNetwork& network() const { return *network_; }
  NodeNetwork& network() { return *network_; }
  // Bytes that the nodes have sent to each other, with the links' headers; 0 with one node.
  std::uint64_t link_bytes() const;
  // The last lines of all.
  std::string log_tail() const;
  // "" after clean exits, else what happened.
  std::string stop();

 private:
  void make_certificates();
  std::string cluster_settings(std::uint32_t node) const;
  void await_all() const;

  const std::string check_;
  std::optional<NodeNetwork> network_;
  std::string directory_;  // of certificates
  std::vector<std::unique_ptr<OwnDaemon>> daemons_;
};

}  // namespace epd::kit
