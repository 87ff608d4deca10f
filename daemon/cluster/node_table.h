// The coordinator's knowledge of each node. Pure.
#pragma once

#include "cluster/cluster.h"
#include "epd/v1/cluster.pb.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace epd::cluster {

constexpr std::size_t kMaxNodes = 1024;

struct NodeRow {
  v1::NodeDescription node;
  NodeState state = NodeState::kUp;
  std::uint64_t since_ns = 0;
  std::uint64_t heard_ns = 0;
  bool connected = false;  // a stream carries its channel
  std::string reason;
};

class NodeTable {
 public:
  explicit NodeTable(std::uint32_t node_timeout_ms);

  // RESOURCE_EXHAUSTED if there is no room and no lost node to forget.
  Status up(const v1::NodeDescription& node, std::uint64_t now_ns);
  void heard(const std::string& name, std::uint64_t now_ns);
  void disconnected(const std::string& name, const std::string& reason, std::uint64_t now_ns);
  void drains(const std::string& name, std::uint64_t now_ns);
  void lost(const std::string& name, const std::string& reason, std::uint64_t now_ns);

  // Judges silence. Returns the names of nodes that are lost now.
  std::vector<std::string> tick(std::uint64_t now_ns);
  std::uint64_t next_due_ns() const;

  // Whether a state has changed since the last call.
  bool take_change();
  const NodeRow* find(const std::string& name) const;
  const std::map<std::string, NodeRow>& rows() const { return rows_; }

 private:
  void set(NodeRow& row, NodeState state, const std::string& reason, std::uint64_t now_ns);

  const std::uint64_t timeout_ns_;
  std::map<std::string, NodeRow> rows_;
  bool changed_ = true;
};

// The row as the coordinator sends it, and as a node keeps it.
v1::NodeRow message_of(const NodeRow& row, std::uint64_t now_ns);
NodeState state_of(v1::NodeCondition condition);

}  // namespace epd::cluster
