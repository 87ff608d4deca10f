// The deciders about groups. The node's own registry decides about groups of one node. The coordinator
// decides, through this node's agent, about groups that span nodes. Each event goes to the decider that it
// concerns. Both answer with actions of the same kind.
#pragma once

#include "base/clock.h"
#include "membership/agent.h"
#include "membership/registry.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace epd::membership {

// The numbers of spanning groups are unique in the whole cluster.
constexpr bool is_spanning(std::uint64_t group_id) {
  return (group_id >> 63) != 0;
}

class Deciders {
 public:
  Deciders(const Clock& deadlines, const MembershipLimits& limits, const NodeUp& node);

  // For a node in a cluster. To be called before any other event.
  Agent& make_agent(const ClusterTimes& times, const MembershipLimits& limits, const NodeUp& node);
  void set_limits(const MembershipLimits& limits) { local_.set_limits(limits); }
  const GroupRegistry& local() const { return local_; }

  void handle(const Event& event);
  // ABORTED: the coordinator, which decides about the group, is out of reach.
  Status evict(const EvictRank& event);
  void tick();
  std::uint64_t next_due_ns() const;
  Actions take_actions();

  // Visits all groups that have ranks here. For a spanning group it shows what this node knows: only its own
  // members and engines.
  void each(const std::function<void(const Group&)>& look) const;
  const Group* find(std::uint64_t group_id) const;  // null: there is none
  struct FarRank {
    std::uint32_t rank = 0;
    std::uint32_t device = 0;
    std::string node;
  };
  // Its active ranks on other nodes, in ascending order. None if the group does not span nodes.
  std::vector<FarRank> far_ranks(std::uint64_t group_id) const;

  // Ranks that a group waits for, or continues without. Only the coordinator knows those that a spanning
  // group waits for.
  std::vector<std::uint32_t> missing_ranks(const Group& group) const;

  // How long the coordinator, which decides about the group, has been away; 0: it is there, or the group
  // needs none.
  std::uint64_t coordinator_away_ms(std::uint64_t group_id) const;

  std::size_t num_groups() const;
  // The number of groups that the session is in, or waits for.
  std::uint32_t memberships(std::uint64_t session_id) const;

 private:
  const NearGroup* near_group(std::uint64_t group_id) const;

  const Clock& deadlines_;
  const std::uint32_t num_devices_;
  GroupRegistry local_;
  std::unique_ptr<Agent> agent_;  // null: the node is in no cluster
};

}  // namespace epd::membership
