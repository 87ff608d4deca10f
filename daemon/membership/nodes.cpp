#include "nodes.h"

#include "membership/limits.h"

#include <algorithm>

namespace epd::membership {

std::string Nodes::name_of(std::uint32_t node) const {
  const auto found = nodes_.find(node);
  const bool named = found != nodes_.end() && !found->second.name.empty();
  return named ? found->second.name : "node " + std::to_string(node);
}

void Nodes::node_lost(std::uint32_t node) {
  std::erase_if(up_, [node](const auto& entry) { return entry.first.node == node; });
  lost_.push_back(node);
  if (lost_.size() <= kMaxLostNodes) return;
  nodes_.erase(lost_.front());
  lost_.pop_front();
}

std::string Nodes::in_words(std::uint32_t node) const {
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || found->second.name.empty()) return name_of(node);
  const std::string& address = found->second.address;
  return "node " + found->second.name + (address.empty() ? "" : " (" + address + ")");
}

std::string Nodes::in_words(const SessionId& session) const {
  return std::to_string(session.number) + (session.node == kLocalNode ? "" : " of " + name_of(session.node));
}

std::string Nodes::in_words(EngineId engine) const {
  return "the engine of device " + std::to_string(engine.device) +
         (engine.node == kLocalNode ? "" : " of " + name_of(engine.node));
}

FarEngine Nodes::describe(EngineId engine) const {
  const auto found = up_.find(engine);
  return {engine, name_of(engine.node), found == up_.end() ? "" : found->second};
}

Status Nodes::check_device(EngineId engine) const {
  const auto found = nodes_.find(engine.node);
  const std::size_t devices = found == nodes_.end() ? 0 : found->second.devices.size();
  if (engine.device < devices) return {};
  return invalid_argument("device is " + std::to_string(engine.device) + "; allowed: below " +
                          std::to_string(devices) + " on " + name_of(engine.node));
}

Status Nodes::check_network(EngineId engine) const {
  const auto found = up_.find(engine);
  if (found == up_.end() || !found->second.empty()) return {};
  return {StatusCode::kUnsupported,
          "the engine of " + nodes_.at(engine.node).devices.at(engine.device).name + " on " +
              in_words(engine.node) + " has no network to other nodes; see its log, and epctl doctor there"};
}

Status Nodes::check_reach(EngineId engine, EngineId other) const {
  if (engine.node != other.node) return {};
  if (Status status = check_device(engine); !status.ok()) return status;
  if (Status status = check_device(other); !status.ok()) return status;
  const std::vector<DeviceDescription>& devices = nodes_.at(engine.node).devices;
  const DeviceDescription& device = devices.at(engine.device);
  const bool apart = std::find(device.unreachable.begin(), device.unreachable.end(), other.device) !=
                     device.unreachable.end();
  if (!apart) return {};
  return {StatusCode::kUnsupported, device.name + " can't map the memory of " +
                                        devices.at(other.device).name +
                                        " (no P2P between them; nvidia-smi topo -p2p rw)"};
}

}  // namespace epd::membership
