// Who decides about groups: the node's own registry about groups of one node, and the coordinator, through
// this node's agent, about groups that span nodes. Events go to whom they concern, and what is decided comes
// back as actions of one kind.
#pragma once

#include "base/clock.h"
#include "membership/agent.h"
#include "membership/registry.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace epd::supervisor {

// Spanning groups have numbers of their own, in the whole cluster.
constexpr bool is_spanning(std::uint64_t group_id) {
  return (group_id >> 63) != 0;
}

class Deciders {
 public:
  Deciders(const Clock& deadlines, const membership::MembershipLimits& limits,
           const membership::NodeUp& node);

  // The node is in a cluster. Before the first other event.
  membership::Agent& make_agent(const membership::ClusterTimes& times,
                                const membership::MembershipLimits& limits, const membership::NodeUp& node);
  void set_limits(const membership::MembershipLimits& limits) { local_.set_limits(limits); }

  void handle(const membership::Event& event);
  void tick();
  std::uint64_t next_due_ns() const;
  membership::Actions take_actions();

  // All groups that have ranks here. Of those that span nodes what this node knows: members and engines are
  // its own.
  void each(const std::function<void(const membership::Group&)>& look) const;
  std::optional<membership::Group> find(std::uint64_t group_id) const;
  struct FarRank {
    std::uint32_t rank = 0;
    std::uint32_t device = 0;
    std::string node;
  };
  // Its active ranks on other nodes, ascending. None if it does not span nodes.
  std::vector<FarRank> far_ranks(std::uint64_t group_id) const;

  // Whether the engine is still to be told of a group that one before it has served: the coordinator says of
  // groups that span nodes.
  bool owes_groups(std::uint32_t device) const;
  std::size_t num_groups() const;
  // Groups that the session is in, or waits for.
  std::uint32_t memberships(std::uint64_t session_id) const;

 private:
  const membership::NearGroup* near_group(std::uint64_t group_id) const;

  const Clock& deadlines_;
  const std::uint32_t num_devices_;
  membership::GroupRegistry local_;
  std::unique_ptr<membership::Agent> agent_;  // null: the node is in no cluster
};

}  // namespace epd::supervisor
