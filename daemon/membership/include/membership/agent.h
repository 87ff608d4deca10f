#pragma once

#include "base/clock.h"
#include "membership/group.h"
#include "membership/ids.h"
#include "membership/messages.h"
#include "membership/near_groups.h"
#include "membership/registry.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace epd::membership {

// Pending joins and leaves of a node. Each question that an agent asks in every turn has an index, so a
// request costs the same however many others wait.
class Requests {
 public:
  struct Request {
    Event event;                // JoinRequest, LeaveRequest
    std::uint64_t due_ns = 0;   // of a join; a leave has none
    bool said = false;          // to the coordinator that the agent is attached to
    std::uint64_t held_by = 0;  // the ended group that keeps it from being said; 0: none
  };

  void add(const RequestId& id, Event event, std::uint64_t due_ns);
  const Request* find(const RequestId& id) const;  // null: there is none
  bool erase(const RequestId& id);
  void erase_session(SessionId session);

  // Those that are neither said nor held.
  const std::set<RequestId>& to_say() const { return to_say_; }
  void mark_said(const RequestId& id);
  // The next coordinator has been told of none.
  void unsay_all();

  void hold(const RequestId& id, std::uint64_t group_id);
  std::vector<std::uint64_t> holders() const;
  void release(std::uint64_t group_id);

  const std::set<RequestId>& leaves() const { return leaves_; }
  // Joins that are not said and due by then, the first deadline first.
  std::vector<RequestId> unsaid_joins(std::uint64_t due_by_ns) const;
  // The first deadline of joins that are not said, and of all joins; kNever: there is none.
  std::uint64_t unsaid_due_ns() const { return first(unsaid_joins_); }
  std::uint64_t due_ns() const { return std::min(first(unsaid_joins_), first(said_joins_)); }

 private:
  using Deadlines = std::set<std::pair<std::uint64_t, RequestId>>;
  static std::uint64_t first(const Deadlines& deadlines) {
    return deadlines.empty() ? kNever : deadlines.begin()->first;
  }
  void index(const RequestId& id, const Request& request);
  void unindex(const RequestId& id, const Request& request);

  std::map<RequestId, Request> all_;
  // Indexes of it:
  std::set<RequestId> to_say_;
  std::set<std::pair<std::uint64_t, RequestId>> held_;  // by group
  std::set<RequestId> leaves_;
  Deadlines said_joins_;
  Deadlines unsaid_joins_;
};

// The part of a node that serves the coordinator: it obeys it, answers for the node's engines and sessions,
// and remembers what it has been told. A pure state machine. README has the life of an attachment.
//
// The node's events are those that it would give to a registry of its own, under kLocalNode, and the answers
// are a registry's actions. Actions name nodes by the coordinator's numbers, or by kLocalNode.
class Agent {
 public:
  struct Options {
    ClusterTimes times;
    MembershipLimits limits;  // of groups that end here without the coordinator
    NodeUp node;              // its devices, its boot id
  };
  Agent(const Clock& clock, Options options);

  // Takes an event of the node, other than an eviction. A MemoryAcquired comes before any later event.
  void handle(Event event);
  // Evicts a rank of this node. NOT_FOUND: there is none; UNSUPPORTED: it is on another node, which the text
  // names; ABORTED: the coordinator is out of reach. If OK, each coordinator is told until the member is
  // gone.
  Status evict(const EvictRank& event);
  // A new channel is open, on which nothing has been said.
  void channel_began();
  void handle(const ToAgent& message);
  void tick();
  std::uint64_t next_due_ns() const;

  // Returns the actions decided since the last call, in order.
  Actions take_actions();
  std::vector<ToCoordinator> take_messages();

  const std::map<std::uint64_t, NearGroup>& groups() const { return near_.all(); }
  // Groups that end here without the coordinator.
  const std::map<std::uint64_t, Group>& ended() const { return ended_.groups(); }
  std::uint64_t term() const { return term_; }
  bool attached() const { return state_ == State::kAttached; }
  // Whether the coordinator has been silent for node_timeout_ms.
  bool cut_off() const;
  std::uint64_t silent_ns() const { return clock_.now_ns() - heard_ns_; }
  // Sessions whose last membership is remembered.
  std::size_t num_sessions() const { return generations_.size(); }

 private:
  enum class State {
    kApart,      // no channel, or groups here were ended without the coordinator
    kAttaching,  // Attach said; requests wait
    kAttached,
  };
  struct Eviction {
    EvictRank event;
    RequestId join;  // of its member
  };

  // Messages of the coordinator.
  void obey(const Welcome& message);
  void obey(const Order& message);
  void obey(const PutOut& message);
  void obey(const CoordinatorHeartbeat&) {}
  bool is_late(const Order& order) const;

  // Events of the node.
  void keep(const Event& event);
  bool is_answered_here(const Event& event) const;
  void request(const Event& event);
  bool names_ended(const LeaveRequest& leave) const;
  void say(const Event& event);

  void attach();
  void carry_out(Action action);
  void note_number(std::uint64_t group_id, const MemberDescription& member);
  void end(std::uint64_t group_id, const BreakReason& reason);
  // Selects the lost rank that is named when a group ends.
  enum class Whose { kOwn, kOther };
  static std::optional<std::uint32_t> lost_of(const NearGroup& group, Whose whose);
  void end_all_but(const std::vector<std::uint64_t>& stay, Whose whose, const std::string& why);
  std::string here() const { return "node " + options_.node.name; }
  void release_unstarted();
  void say_requests();
  bool stands(const Eviction& eviction) const;
  void refuse_evicted_joins();
  void say_evictions();
  void forget_evictions();
  void refuse_overdue();
  void give_up();
  bool runs_on(const NearGroup& group) const;
  bool needs_decision() const;
  bool has_leave_of(const NearGroup& group) const;
  void refuse_leaves();
  const Group* waits_for(const Event& request) const;  // null: for nobody
  void send(decltype(ToCoordinator::body) body);
  void take_from_ended();  // what is decided there, and what has waited for it

  const Clock& clock_;
  const Options options_;
  State state_ = State::kApart;
  std::uint64_t term_ = 0;     // the highest heard of
  std::uint64_t attempt_ = 0;  // to attach
  std::uint32_t number_ = 0;
  std::string put_out_;        // why, until it is welcome again
  std::uint64_t heard_ns_;     // when the coordinator was heard of last
  std::uint64_t beat_ns_ = 0;  // when the next heartbeat is due
  std::uint64_t told_ = 0;     // events since Attach
  bool drains_ = false;
  Status drain_status_;
  std::map<std::uint32_t, std::string> engines_;       // those that are up: their addresses
  std::map<std::uint32_t, std::uint64_t> known_from_;  // the event that has told of the engine
  Requests requests_;
  std::vector<Eviction> evictions_;                     // said, of members that are still here
  std::map<std::uint64_t, std::uint32_t> generations_;  // by session: the last of its memberships
  NearGroups near_;
  GroupRegistry ended_;  // groups that end here without the coordinator
  Actions actions_;
  std::vector<ToCoordinator> messages_;
};

}  // namespace epd::membership
