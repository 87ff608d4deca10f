// Messages of registries, agents and coordinators. proto/structs.py makes the structs from
// proto/epd/v1/membership.proto, which says what they mean. They are plain data, without descriptors and
// pointers, so the receiver may be another node. An event tells a registry what has happened. An action says
// what a registry wants done, and is complete: whoever carries it out need not ask back.
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
// Its engines, sessions and ranks are gone for ever, and its number is not used again: a node that comes back
// gets another.
struct NodeLost {
  std::uint32_t node = kLocalNode;
  std::string text;
};

#include "membership/structs.inc"

using Actions = std::vector<Action>;

// Whether the rank went as it should (SessionClosed, EvictRank).
inline bool is_orderly(std::string_view how) {
  return how == "left" || how == "detached";
}

// Returns the node that sent the event. Null: no node did.
const std::uint32_t* node_of(const Event& event);
// Sets the node of the event's engine and session.
void set_node(Event& event, std::uint32_t node);

// "break device=1 group=3 epoch=2 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=7": for logs and tests.
// Another node than the local one is named at the end: " node=2".
std::string to_string(const Action& action);
// Returns the node that carries the action out.
std::uint32_t node_of(const Action& action);

}  // namespace epd::membership
