// The state that the parts of the registry share: pending answers and actions, nodes, groups, memberships.
#pragma once

#include "base/clock.h"
#include "common/status.h"
#include "membership/group.h"
#include "membership/ids.h"
#include "membership/messages.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace epd::membership {

// The desk knows the time and the limits, collects actions, and answers each pending request once.
class Desk {
 public:
  Desk(const Clock& clock, const MembershipLimits& limits, std::optional<Spanning> spanning)
      : clock_(clock), limits_(limits), spanning_(std::move(spanning)) {}

  std::uint64_t now_ns() const { return clock_.now_ns(); }
  std::uint64_t due_in_ms(std::uint64_t ms) const { return now_ns() + ms * 1'000'000; }
  // When a join that asks to wait for `timeout_ms` (0: the default) is refused.
  std::uint64_t join_due_ns(std::uint32_t timeout_ms) const {
    return due_in_ms(timeout_ms != 0 ? timeout_ms : limits_.join_timeout_ms);
  }
  const MembershipLimits& limits() const { return limits_; }
  void set_limits(const MembershipLimits& limits) { limits_ = limits; }
  // Whether the groups may have ranks on several nodes.
  bool spans() const { return spanning_.has_value(); }
  EpochKey new_epoch_key() const { return spans() ? spanning_->new_epoch_key() : EpochKey{}; }

  // Nothing is wanted of a node that is lost.
  template <typename T>
  void emit(T action) {
    Action whole(std::move(action));
    if (!lost_.contains(node_of(whole))) actions_.push_back(std::move(whole));
  }
  Actions take_actions() { return std::exchange(actions_, {}); }

  // False: the request is pending already, so it has been said twice.
  bool expect(const RequestId& request) { return owed_.insert(request).second; }
  // Once for each request; nothing is said to a session that has closed.
  template <typename Reply>
  void answer(Reply reply) {
    if (owed_.erase(reply.request) == 1) emit(std::move(reply));
  }
  void refuse(const RequestId& request, Status status) { answer(ReplyRefused{request, std::move(status)}); }
  void sessions_closed(const EndedSessions& ended) {
    std::erase_if(owed_, [&ended](const RequestId& request) { return ended.contains(request.session); });
  }
  // Numbers grow, so the lowest is the one that was lost long ago.
  void node_lost(std::uint32_t node) {
    lost_.insert(node);
    if (lost_.size() > kMaxLostNodes) lost_.erase(lost_.begin());
  }
  bool is_lost(std::uint32_t node) const { return lost_.contains(node); }

 private:
  const Clock& clock_;
  MembershipLimits limits_;
  const std::optional<Spanning> spanning_;
  std::set<std::uint32_t> lost_;
  Actions actions_;
  std::set<RequestId> owed_;
};

// Which engines are up, and which of a node's devices reach each other.
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

// The groups, by number and by name.

using GroupName = std::pair<std::uint32_t, std::string>;  // uid, name

class GroupTable {
 public:
  explicit GroupTable(std::uint64_t first_id, std::set<std::uint64_t> taken_ids = {})
      : next_id_(first_id), taken_ids_(std::move(taken_ids)) {}

  const std::map<std::uint64_t, Group>& all() const { return groups_; }
  std::map<std::uint64_t, Group>& all() { return groups_; }
  std::vector<std::uint64_t> ids() const;
  Group* find(std::uint64_t group_id);
  // Finds groups that can be joined by their name.
  Group* find_named(const GroupName& name);
  EngineSlot* find_slot(std::uint64_t group_id, EngineId engine);

  // RESOURCE_EXHAUSTED: no further group for this user, nor, if there are several nodes, for the rank's node.
  Status check_quotas(const JoinRequest& request, std::uint32_t max_groups, bool several_nodes) const;
  std::uint64_t count_if(const std::function<bool(const Group&)>& test) const;
  Group& add(const JoinRequest& request, std::uint64_t now_ns);
  // Adds a group that another registry has begun.
  Group& put(Group group);
  // Frees the name of a group that ends, so that the next group can have it.
  void drop_name(const Group& group);
  void erase(std::uint64_t group_id);

 private:
  std::uint64_t next_id_;
  const std::set<std::uint64_t> taken_ids_;  // no new group gets one of them
  std::map<std::uint64_t, Group> groups_;
  std::map<GroupName, std::uint64_t> names_;
};

// Which session is which rank of which group, by member number.
class Memberships {
 public:
  static constexpr std::uint32_t kMaxPerSession = 256;

  // `first_index`: the least index in each session.
  explicit Memberships(std::uint32_t first_index) : first_index_(first_index) {}

  struct Place {
    std::uint64_t group_id = 0;  // 0: free
    std::uint32_t rank = 0;
    std::uint32_t generation = 0;
    std::uint32_t member = 0;  // its number
  };

  // The number of a new membership; RESOURCE_EXHAUSTED: the session has as many as it may.
  Result<std::uint32_t> take(const JoinRequest& request, std::uint64_t group_id, std::uint32_t rank);
  // Adds a membership with a given number. Another one of the session may have the same index.
  void adopt(SessionId session, std::uint32_t member, std::uint64_t group_id, std::uint32_t rank);
  // Only when no engine knows the membership any more: its index is given out again.
  void free(SessionId session, std::uint32_t member);
  void forget(const EndedSessions& ended) {
    std::erase_if(sessions_, [&ended](const auto& entry) { return ended.contains(entry.first); });
  }

  // Null: the session has no such membership.
  const Place* find(SessionId session, std::uint32_t member) const;
  // All memberships of the session.
  std::vector<Place> of(SessionId session) const;

 private:
  Place* find_place(SessionId session, std::uint32_t member);

  const std::uint32_t first_index_;
  std::map<SessionId, std::vector<Place>> sessions_;
};

}  // namespace epd::membership
