#include "nodes.h"

#include <algorithm>

namespace epd::membership {

std::string Nodes::name_of(std::uint32_t node) const {
  const auto found = nodes_.find(node);
  const bool named = found != nodes_.end() && !found->second.name.empty();
  return named ? found->second.name : "node " + std::to_string(node);
}

std::string Nodes::boot_of(std::uint32_t node) const {
  const auto found = nodes_.find(node);
  return found == nodes_.end() ? "" : found->second.boot;
}

FarEngine Nodes::describe(EngineId engine) const {
  const auto found = up_.find(engine);
  return {engine, name_of(engine.node), found == up_.end() ? "" : found->second};
}

Status Nodes::check_reach(EngineId engine, EngineId other) const {
  if (engine.node != other.node) return {};
  const std::vector<DeviceDescription>& devices = nodes_.at(engine.node).devices;
  if (engine.device >= devices.size() || other.device >= devices.size())
    return invalid_argument("device " + std::to_string(std::max(engine.device, other.device)) + " of " +
                            name_of(engine.node) + "; allowed: below " + std::to_string(devices.size()));
  const DeviceDescription& device = devices.at(engine.device);
  const bool apart = std::find(device.unreachable.begin(), device.unreachable.end(), other.device) !=
                     device.unreachable.end();
  if (!apart) return {};
  return {StatusCode::kUnsupported, device.name + " can't map the memory of " +
                                        devices.at(other.device).name +
                                        " (no P2P between them; nvidia-smi topo -p2p rw)"};
}

}  // namespace epd::membership
