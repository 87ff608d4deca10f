// Which engines are up, and which of a node's devices reach each other.
#pragma once

#include "common/status.h"
#include "membership/messages.h"

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace epd::membership {

class Nodes {
 public:
  void node_up(const NodeUp& event) { nodes_[event.node] = event; }
  void node_lost(std::uint32_t node);
  void engine_up(const EngineUp& event) { up_[event.engine] = event.address; }
  void engine_down(EngineId engine) { up_.erase(engine); }

  bool is_up(EngineId engine) const { return up_.contains(engine); }
  // "node-b"; "node 3" if it has no name.
  std::string name_of(std::uint32_t node) const;
  // "node node-b (10.0.0.2:7410)"
  std::string in_words(std::uint32_t node) const;
  // "12", on another node than the local one "12 of node-b"
  std::string in_words(const SessionId& session) const;
  // "the engine of device 1", "the engine of device 1 of node-b"
  std::string in_words(EngineId engine) const;
  std::size_t num_known() const { return nodes_.size(); }
  FarEngine describe(EngineId engine) const;
  // INVALID_ARGUMENT: its node has no such device.
  Status check_device(EngineId engine) const;
  // UNSUPPORTED: it is up, and engines of other nodes can't reach it.
  Status check_network(EngineId engine) const;
  // OK, or UNSUPPORTED: the engine can't map the other's memory.
  Status check_reach(EngineId engine, EngineId other) const;

 private:
  std::map<std::uint32_t, NodeUp> nodes_;  // and those of lost_: texts name them
  std::deque<std::uint32_t> lost_;         // the last kMaxLostNodes
  std::map<EngineId, std::string> up_;     // their addresses
};

}  // namespace epd::membership
