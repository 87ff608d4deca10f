// What registries, agents and coordinators are told and say. proto/structs.py makes the structs from
// proto/epd/v1/membership.proto, which says what they mean: plain data, without descriptors and pointers, so
// that a node may be another one. An event is what a registry is told. An action is what it wants done, and
// whole, so that whoever carries it out need not ask back.
#pragma once

#include "base/quota.h"
#include "common/status.h"
#include "membership/ids.h"
#include "proto/attach.h"
#include "proto/link.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace epd::membership {

struct DeviceDescription {
  std::string name;
  std::vector<std::uint32_t> unreachable;  // devices of its node whose memory its engine can't map
};
// Comes before anything else that the node sends.
struct NodeUp {
  std::uint32_t node = kLocalNode;
  std::vector<DeviceDescription> devices;
  std::string name = {};     // "": it has none but its number
  std::string boot = {};     // names the run of its daemon
  std::string address = {};  // under which other nodes know it, for texts; "": unknown
};
// Its engines, its sessions and its ranks are gone for ever, and its number names nobody any more: a node
// that comes back is another one.
struct NodeLost {
  std::uint32_t node = kLocalNode;
  std::string text;
};

#include "membership/structs.inc"

using Actions = std::vector<Action>;

// Whether a rank that went so (SessionClosed, EvictRank) did what it should.
inline bool is_orderly(std::string_view how) {
  return how == "left" || how == "detached";
}

// The node that has sent it; null: no node has.
const std::uint32_t* node_of(const Event& event);
// Names its engine and its session as those of this node.
void set_node(Event& event, std::uint32_t node);

// "break device=1 group=3 epoch=2 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=7": for logs and tests.
// What is for another node than the local one says " node=2" behind.
std::string to_string(const Action& action);
// Which node is to carry it out.
std::uint32_t node_of(const Action& action);

}  // namespace epd::membership
