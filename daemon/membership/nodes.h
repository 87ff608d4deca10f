// Which engines are up, and which of a node's devices reach each other.
#pragma once

#include "common/status.h"
#include "membership/actions.h"
#include "membership/events.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace epd::membership {

class Nodes {
 public:
  void node_up(const NodeUp& event) { nodes_[event.node] = event; }
  void node_lost(std::uint32_t node) {
    std::erase_if(up_, [node](const auto& entry) { return entry.first.node == node; });
  }
  void engine_up(const EngineUp& event) { up_[event.engine] = event.address; }
  void engine_down(EngineId engine) { up_.erase(engine); }

  bool is_up(EngineId engine) const { return up_.contains(engine); }
  // "node-b"; "node 3" if it has no name.
  std::string name_of(std::uint32_t node) const;
  std::string boot_of(std::uint32_t node) const;
  FarEngine describe(EngineId engine) const;
  // OK, or UNSUPPORTED: the engine can't map the other's memory.
  Status check_reach(EngineId engine, EngineId other) const;

 private:
  std::map<std::uint32_t, NodeUp> nodes_;  // lost ones too: texts name them
  std::map<EngineId, std::string> up_;     // their addresses
};

}  // namespace epd::membership
