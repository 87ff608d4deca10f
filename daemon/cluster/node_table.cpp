#include "node_table.h"

#include <algorithm>
#include <limits>

namespace epd::cluster {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;

std::string seconds(std::uint64_t ns) {
  const std::uint64_t tenths = ns / (100 * kMsNs);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

v1::NodeCondition message_of(NodeState state) {
  switch (state) {
    case NodeState::kUp: return v1::NODE_CONDITION_UP;
    case NodeState::kSilent: return v1::NODE_CONDITION_SILENT;
    case NodeState::kLost: return v1::NODE_CONDITION_LOST;
    case NodeState::kDraining: return v1::NODE_CONDITION_DRAINING;
    case NodeState::kUnknown: break;  // no coordinator's table has it
  }
  return v1::NODE_CONDITION_UNSPECIFIED;
}

}  // namespace

NodeState state_of(v1::NodeCondition condition) {
  switch (condition) {
    case v1::NODE_CONDITION_UP: return NodeState::kUp;
    case v1::NODE_CONDITION_SILENT: return NodeState::kSilent;
    case v1::NODE_CONDITION_DRAINING: return NodeState::kDraining;
    default: return NodeState::kLost;
  }
}

v1::NodeRow message_of(const NodeRow& row, std::uint64_t now_ns) {
  v1::NodeRow message;
  *message.mutable_node() = row.node;
  message.set_condition(message_of(row.state));
  message.set_since_ms((now_ns - row.since_ns) / kMsNs);
  message.set_reason(row.reason);
  return message;
}

NodeTable::NodeTable(std::uint32_t node_timeout_ms) : timeout_ns_(node_timeout_ms * kMsNs) {}

Status NodeTable::up(const v1::NodeDescription& node, std::uint64_t now_ns) {
  auto found = rows_.find(node.name());
  if (found == rows_.end() && rows_.size() >= kMaxNodes) {
    auto oldest = rows_.end();
    for (auto row = rows_.begin(); row != rows_.end(); ++row) {
      if (row->second.state != NodeState::kLost) continue;
      if (oldest == rows_.end() || row->second.since_ns < oldest->second.since_ns) oldest = row;
    }
    if (oldest == rows_.end()) {
      return resource_exhausted("the cluster has " + std::to_string(rows_.size()) +
                                " nodes; allowed: at most " + std::to_string(kMaxNodes));
    }
    rows_.erase(oldest);
  }
  if (found == rows_.end()) {
    found = rows_.emplace(node.name(), NodeRow()).first;
    found->second.since_ns = now_ns;
  }
  NodeRow& row = found->second;
  if (row.node.boot_id() != node.boot_id()) row.since_ns = now_ns;
  row.node = node;
  row.connected = true;
  row.heard_ns = now_ns;
  set(row, node.draining() ? NodeState::kDraining : NodeState::kUp, "", now_ns);
  changed_ = true;
  return {};
}

void NodeTable::heard(const std::string& name, std::uint64_t now_ns) {
  const auto found = rows_.find(name);
  if (found == rows_.end() || !found->second.connected) return;
  NodeRow& row = found->second;
  row.heard_ns = now_ns;
  if (row.state == NodeState::kSilent)
    set(row, row.node.draining() ? NodeState::kDraining : NodeState::kUp, "", now_ns);
}

void NodeTable::disconnected(const std::string& name, const std::string& reason, std::uint64_t now_ns) {
  const auto found = rows_.find(name);
  if (found == rows_.end() || found->second.state == NodeState::kLost) return;
  found->second.connected = false;
  set(found->second, NodeState::kSilent, reason, now_ns);
}

void NodeTable::drains(const std::string& name, std::uint64_t now_ns) {
  const auto found = rows_.find(name);
  if (found == rows_.end()) return;
  found->second.node.set_draining(true);
  if (found->second.state == NodeState::kUp) set(found->second, NodeState::kDraining, "", now_ns);
}

void NodeTable::lost(const std::string& name, const std::string& reason, std::uint64_t now_ns) {
  const auto found = rows_.find(name);
  if (found == rows_.end()) return;
  found->second.connected = false;
  set(found->second, NodeState::kLost, reason, now_ns);
}

std::vector<std::string> NodeTable::tick(std::uint64_t now_ns) {
  std::vector<std::string> gone;
  for (auto& [name, row] : rows_) {
    if (row.state == NodeState::kLost) continue;
    const std::uint64_t silence = now_ns - row.heard_ns;
    if (silence >= timeout_ns_) {
      set(row, NodeState::kLost, "it has said nothing for " + seconds(silence), now_ns);
      row.connected = false;
      gone.push_back(name);
    } else if (silence >= timeout_ns_ / 2 && row.state != NodeState::kSilent) {
      set(row, NodeState::kSilent, "it says nothing", now_ns);
    }
  }
  return gone;
}

std::uint64_t NodeTable::next_due_ns() const {
  std::uint64_t due = std::numeric_limits<std::uint64_t>::max();
  for (const auto& [name, row] : rows_) {
    if (row.state == NodeState::kLost) continue;
    const std::uint64_t wait = row.state == NodeState::kSilent ? timeout_ns_ : timeout_ns_ / 2;
    due = std::min(due, row.heard_ns + wait);
  }
  return due;
}

bool NodeTable::take_change() {
  const bool changed = changed_;
  changed_ = false;
  return changed;
}

const NodeRow* NodeTable::find(const std::string& name) const {
  const auto found = rows_.find(name);
  return found == rows_.end() ? nullptr : &found->second;
}

void NodeTable::set(NodeRow& row, NodeState state, const std::string& reason, std::uint64_t now_ns) {
  if (row.state != state) row.since_ns = now_ns;
  if (row.state == state && row.reason == reason) return;
  row.state = state;
  row.reason = reason;
  changed_ = true;
}

}  // namespace epd::cluster
