// Decides about the groups that span nodes: knows the nodes, gives the registry what their agents say, and
// tells each agent what its node is to do. A pure state machine. README has the life of a node.
// It begins by listening for node_timeout_ms. Groups of an earlier coordinator in which no answer was pending
// continue, and their nodes keep their numbers. The others end.
#pragma once

#include "base/clock.h"
#include "membership/ids.h"
#include "membership/messages.h"
#include "membership/registry.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace epd::membership {

struct NodeEntry {
  enum class State { kReporting, kUp, kLost };

  State state = State::kReporting;
  std::uint32_t number = 0;    // 0: it has none yet
  std::uint64_t since_ns = 0;  // of the state
  std::uint64_t heard_ns = 0;
  std::string text;  // kLost: why
  bool drains = false;
  Attach attach;
  std::uint64_t attach_term = 0;      // of the coordinator whose number it has
  std::uint64_t heard = 0;            // events since Attach
  std::deque<ToCoordinator> waiting;  // kReporting: for the others' reports
};

class Coordinator {
 public:
  struct Options {
    ClusterTimes times;
    MembershipLimits limits;
    std::uint64_t first_term = 1;  // higher than that of whoever was there before, if that can be known
    std::function<EpochKey()> new_epoch_key;
    std::function<std::string(const std::string& node)> address_of = {};  // for texts; may be missing
    // The most that the coordinator's own limits give a user, if a node says a higher one; may be missing.
    std::function<Quota(std::uint32_t uid)> most_groups_of = {};
    // Whether the node's ranks may be the user's; may be missing.
    std::function<Status(const std::string& node, std::uint32_t uid)> check_user = {};
  };
  struct Sent {
    std::string node;
    ToAgent message;
  };
  Coordinator(const Clock& clock, Options options);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // `node` is the name that its channel has proved.
  void handle(const std::string& node, ToCoordinator message);
  // The node's daemon has ended: connections to it are refused.
  void node_gone(const std::string& node, const std::string& how);
  void tick();
  std::uint64_t next_due_ns() const;
  std::vector<Sent> take_messages();

  // A higher term exists, so this coordinator decides nothing any more.
  bool superseded() const { return superseded_; }
  std::uint64_t term() const { return term_; }
  bool listening() const { return registry_ == nullptr; }
  const std::map<std::string, NodeEntry>& nodes() const { return nodes_; }
  const std::map<std::uint64_t, Group>& groups() const;

 private:
  void attach(const std::string& name, const Attach& message, std::uint64_t term);
  // For messages that come while it listens. Puts out a node that sends too many.
  void keep_for_later(std::map<std::string, NodeEntry>::iterator node, ToCoordinator message);
  void take(const std::string& name, NodeEntry& node, const ToCoordinator& message);
  bool may_say(const NodeEntry& node, const Event& event) const;
  Status check_user(const std::string& name, std::uint32_t uid) const;
  void forget_lost();
  void open();
  void admit(const std::string& name, NodeEntry& node);
  std::set<std::uint64_t> begin_beyond_reports();
  bool is_in_use(std::uint32_t number) const;
  std::uint32_t next_number(std::uint32_t former);
  std::map<std::uint32_t, std::vector<std::uint64_t>> adopt(std::vector<Group> groups);
  void lose(const std::string& name, NodeEntry& node, const std::string& how);
  void tell(Event event);
  bool take_address(const EngineUp& up);
  template <typename Test>
  void forget(const Test& test);  // of engines
  void note_kill(EngineId engine);
  void carry_out();
  void send(const std::string& name, const NodeEntry& node, decltype(ToAgent::body) body);

  const Clock& clock_;
  const Options options_;
  std::uint64_t term_;
  std::uint64_t open_ns_;  // when it has listened long enough
  std::uint64_t beat_ns_;
  bool superseded_ = false;
  std::uint32_t next_number_ = 1;  // of nodes
  std::map<std::string, NodeEntry> nodes_;
  std::map<std::uint32_t, std::string> names_;  // of numbers in use
  std::map<std::string, EngineId> addresses_;   // of engines that are up
  struct Kills {                                // orders to kill an engine since it was down
    std::uint64_t first_ns = 0;
    std::uint64_t last_ns = 0;
  };
  std::map<EngineId, Kills> kills_;
  std::unique_ptr<GroupRegistry> registry_;  // null while it listens
  std::vector<Sent> messages_;
};

}  // namespace epd::membership
