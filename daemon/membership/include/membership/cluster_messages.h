// What agents and their coordinator say to each other: plain data. Between the two is a channel, first in
// first out. It loses nothing until it is begun anew; then the agent says Attach, and nothing that was said
// before counts.
#pragma once

#include "membership/actions.h"
#include "membership/events.h"

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace epd::membership {

// ---- from an agent

// A rank of the reporting node.
struct RankReport {
  std::uint32_t rank = 0;
  std::uint32_t device = 0;
  std::uint64_t session = 0;
  std::uint32_t member = 0;
  std::uint32_t uid = 0;
  std::int32_t pid = 0;
  std::uint32_t sms = 0;
  std::int32_t priority = 0;
  std::uint32_t bound = 0;
  std::uint32_t join_request = 0;
  std::uint64_t active_since = 0;
  std::uint64_t first_index = 0;
};
// A group of which everything here serves its epoch, and nothing is owed.
struct GroupReport {
  GroupDescription told;  // without members and far engines
  std::uint32_t asked_sum_ranks = 0;
  std::vector<RankReport> ranks;
};
struct EngineReport {
  std::uint32_t device = 0;
  std::string address;
};
// The first message on a channel.
struct Attach {
  std::uint64_t attempt = 0;  // its number; Welcome says it back
  std::string boot;           // names the run of its daemon
  std::uint32_t number = 0;   // as the last Welcome has said it; 0: none has
  bool drains = false;
  std::vector<DeviceDescription> devices;
  std::vector<EngineReport> engines;  // those that are up
  std::vector<GroupReport> groups;    // of the coordinator of that term
};
struct AgentHeartbeat {
  bool hears = true;  // false: it has heard nothing of the coordinator for node_timeout_ms
};
struct Told {
  Event event;
};
// The answer to a message of a term that is over.
struct Superseded {};

struct ToCoordinator {
  std::uint64_t term = 0;  // the last that has welcomed the agent; 0: none has
  std::variant<Attach, AgentHeartbeat, Told, Superseded> body;
};

// ---- from a coordinator

// The answer to Attach. Spanning groups that are not named end here.
struct Welcome {
  std::uint64_t attempt = 0;
  std::vector<std::uint64_t> groups;
};
struct CoordinatorHeartbeat {};
struct Order {
  std::uint64_t heard = 0;  // events of the node since Attach that it knew when it decided
  Action action;
};
// The node counts as lost: it has to attach anew.
struct PutOut {
  std::string text;
};

struct ToAgent {
  std::uint64_t term = 0;
  std::uint32_t number = 0;  // of the node; no coordinator gives one twice
  std::variant<Welcome, CoordinatorHeartbeat, Order, PutOut> body;
};

}  // namespace epd::membership
