// Which engines are up, and which of a node's devices reach each other.
#pragma once

#include "common/status.h"
#include "membership/events.h"

#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace epd::membership {

class Nodes {
 public:
  void node_up(const NodeUp& event) { devices_[event.node] = event.devices; }
  void engine_up(EngineId engine) { up_.insert(engine); }
  void engine_down(EngineId engine) { up_.erase(engine); }

  bool is_up(EngineId engine) const { return up_.contains(engine); }
  // OK, or UNSUPPORTED: the engine can't map the other's memory.
  Status check_reach(EngineId engine, EngineId other) const;

 private:
  std::map<std::uint32_t, std::vector<DeviceDescription>> devices_;  // by node, then device
  std::set<EngineId> up_;
};

}  // namespace epd::membership
