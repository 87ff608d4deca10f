// What the registry is told: plain data, without descriptors and pointers, so that a node may be another one.
// The events of one node come in the order in which that node has sent them; those of different nodes in any
// order. An event that nothing waits for any more, or that has been told before, changes nothing.
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

// ---- from nodes

struct DeviceDescription {
  std::string name;
  std::vector<std::uint32_t> unreachable;  // devices of its node whose memory its engine can't map
};
// Before anything else that the node sends.
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
// It admits nobody any more: its joins that others are in the way of are refused with the status.
struct NodeDrains {
  std::uint32_t node = kLocalNode;
  Status status;
};
// The answer to AcquireMemory.
struct MemoryAcquired {
  RequestId request;
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
  Status status;
};

// ---- from clients; each join and leave is answered by exactly one Reply action, now or later, unless its
// session closes first

// Its client's descriptors, and what quotas it has for memory, stay with its node.
struct JoinRequest {
  RequestId id;
  std::uint32_t uid = 0;
  std::int32_t pid = 0;
  EngineId engine;
  abi::DeviceKind device_kind = abi::DeviceKind::kHost;
  abi::Join join{};
  Quota max_groups;                // of its user
  std::uint32_t num_memories = 0;  // descriptors of memory that came with it
  // The number of its membership has a later one: its node knows memberships of groups that have ended.
  std::uint32_t last_generation = 0;
};
struct LeaveRequest {
  RequestId id;
  std::uint32_t member = 0;
};
struct SessionClosed {
  SessionId session;
  std::string how;  // "died", "detached", "was ended: ..."
};
// Whether a rank that went so did what it should.
inline bool is_orderly(std::string_view how) {
  return how == "left" || how == "detached";
}
// The rank is lost as if it had left; `how` says so to the others. A join that waits is refused with it. A
// node may say it of its own ranks.
struct EvictRank {
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
  std::string how;
};

// ---- from engines, through their node

// Board::next_index of a rank.
struct BoardIndex {
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
  std::uint64_t next_index = 0;
};
// kReady has come and its sessions have been told to it.
struct EngineUp {
  EngineId engine;
  std::string address = {};  // under which engines of other nodes reach it; "": none does
};
struct EngineDown {
  EngineId engine;
  std::string text;
  std::vector<BoardIndex> boards;  // of all ranks on its device
};
struct GroupReady {
  EngineId engine;
  abi::GroupReady message{};
  std::vector<BoardIndex> boards;  // of the group's ranks on its device
};
// The engine lives, and its answer takes longer than it is to blame for.
struct GroupWaits {
  EngineId engine;
  abi::GroupWaits message{};
};
struct MemberStopped {
  EngineId engine;
  abi::MemberRef message{};
};
struct BreakRequested {
  EngineId engine;
  abi::Break message{};
};
struct Broken {
  EngineId engine;
  abi::Broken message{};
};
struct Resumed {
  EngineId engine;
  abi::Resumed message{};
};
struct GroupRemoved {
  EngineId engine;
  abi::GroupRef message{};
};
// A rank's own memory can't be used by the engine: a group that starts is refused, one that runs loses it.
struct RankRefused {
  EngineId engine;
  abi::RankRefused message{};
};
// An engine of another node, with which it shares groups, is of no use to it.
struct PeerLost {
  EngineId engine;
  EngineId far;
  std::string text;
  abi::PeerLoss loss = abi::PeerLoss::kUnreachable;
};

using Event =
    std::variant<NodeUp, NodeLost, NodeDrains, MemoryAcquired, JoinRequest, LeaveRequest, SessionClosed,
                 EvictRank, EngineUp, EngineDown, GroupReady, GroupWaits, MemberStopped, BreakRequested,
                 Broken, Resumed, GroupRemoved, RankRefused, PeerLost>;

// The node that has sent it; null: no node has.
const std::uint32_t* node_of(const Event& event);
// Names its engine and its session as those of this node.
void set_node(Event& event, std::uint32_t node);

}  // namespace epd::membership
