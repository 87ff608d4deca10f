#include "nodes.h"

#include <algorithm>

namespace epd::membership {

Status Nodes::check_reach(EngineId engine, EngineId other) const {
  if (engine.node != other.node) return {};
  const std::vector<DeviceDescription>& devices = devices_.at(engine.node);
  const DeviceDescription& device = devices.at(engine.device);
  const bool apart = std::find(device.unreachable.begin(), device.unreachable.end(), other.device) !=
                     device.unreachable.end();
  if (!apart) return {};
  return {StatusCode::kUnsupported, device.name + " can't map the memory of " +
                                        devices.at(other.device).name +
                                        " (no P2P between them; nvidia-smi topo -p2p rw)"};
}

}  // namespace epd::membership
