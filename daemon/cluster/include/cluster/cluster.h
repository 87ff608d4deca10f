// This daemon's part in a cluster: it takes nodes in if it is the coordinator, else it attaches to the
// coordinator.
#pragma once

#include "base/clock.h"
#include "cluster/settings.h"
#include "common/status.h"
#include "membership/agent.h"
#include "membership/group.h"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace epd::cluster {

using BootId = std::array<std::uint8_t, 16>;

enum class NodeState {
  kUp,
  kSilent,    // its stream has ended, or it has said nothing for half of node_timeout_ms
  kLost,      // for node_timeout_ms, or its daemon is known to have ended
  kDraining,  // up, and it takes no more sessions
  kUnknown,   // the coordinator, which would tell, is away
};

struct NodeView {
  std::string name;
  BootId boot_id{};
  std::string address;
  std::string version;  // of its daemon
  NodeState state = NodeState::kUp;
  std::uint64_t since_ms = 0;             // in this state
  std::optional<std::uint64_t> heard_ms;  // since its last message; of those that this daemon hears itself
  std::string reason;                     // of its state; empty: nothing to say
  bool own = false;
  bool coordinator = false;
};

struct View {
  bool coordinates = false;
  std::uint64_t term = 0;  // 0: no coordinator has been heard of
  // Why this node has no coordinator; empty: it has one.
  std::string problem;
  std::uint64_t problem_ms = 0;
  std::int64_t certificate_expires_unix_s = 0;  // of the one in use; 0: none
  // Sorted by name. A node that does not coordinate has the coordinator's last list.
  std::vector<NodeView> nodes;
  std::vector<std::pair<std::string, std::uint64_t>> refusals;  // by reason; those that are not zero
};

// A group that spans nodes, as the coordinator's registry has it.
struct SpanningGroup {
  std::uint64_t id = 0;
  std::uint32_t uid = 0;
  std::string name;
  membership::GroupPhase phase{};
  std::uint64_t epoch = 0;
  std::vector<std::pair<std::uint32_t, std::string>> ranks;  // with the names of their nodes
};

// Runs a task on the daemon's loop, from any thread. False: the loop has stopped.
using Post = std::function<bool(std::function<void()>)>;

// Everything belongs to the loop.
class Cluster {
 public:
  struct Ground {
    const Clock& clock;  // for deadlines
    Post post;
    BootId boot_id{};
    std::string version;  // of the daemon
    // The node's agent. Its owner gives it events, ticks it, and carries out its actions in each turn of the
    // loop, before tick() and after it. The cluster carries messages between it and the coordinator.
    membership::Agent& agent;
    membership::MembershipLimits limits;  // of groups that span nodes, if this node coordinates
    std::uint32_t orphan_ms = 10'000;     // cluster.orphan_ms
    std::function<Quota(std::uint32_t uid)> most_groups_of = {};  // of a user, if this node coordinates
  };
  // Opens the port. `settings` as complete() has returned them.
  static Result<std::unique_ptr<Cluster>> start(const Settings& settings, Ground ground);
  // Ends every connection. After the loop has stopped.
  virtual ~Cluster() = default;

  virtual void drain() = 0;  // the others are told, once
  virtual void leave() = 0;  // the others are told that the daemon ends now

  // Once per turn of the loop.
  virtual void tick() = 0;
  virtual std::uint64_t next_due_ns() const = 0;

  virtual View view() const = 0;
  // Where this node coordinates; otherwise none. By id.
  virtual std::vector<SpanningGroup> spanning_groups() const = 0;
  virtual const Settings& settings() const = 0;
};

}  // namespace epd::cluster
