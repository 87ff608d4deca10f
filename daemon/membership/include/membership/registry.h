// All groups of a daemon, and the protocol by which they form, break, recover and end, as a pure state
// machine: events in, actions out, time injected. It calls nobody: what it asks for is an action, and the
// answer to it an event. README of daemon/ draws the protocol.
//
// Threads: none of its own; the supervisor's loop calls it.
#pragma once

#include "base/clock.h"
#include "membership/group.h"
#include "membership/ids.h"
#include "membership/messages.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

namespace epd::membership {

class GroupRegistry {
 public:
  // `spanning`: for a registry of groups that span nodes.
  GroupRegistry(const Clock& clock, const MembershipLimits& limits,
                std::optional<Spanning> spanning = std::nullopt);
  ~GroupRegistry();
  GroupRegistry(const GroupRegistry&) = delete;
  GroupRegistry& operator=(const GroupRegistry&) = delete;

  void set_limits(const MembershipLimits& limits);

  void handle(const Event& event);
  // Takes over a group of another registry. Its engines are those that are up.
  void adopt(Group group);
  // Takes over a group and ends it: none of its operations is completed.
  void adopt_to_end(Group group, BreakReason reason);
  // Deals with what is due. Call at next_due_ns() or later (UINT64_MAX: nothing will be due).
  void tick();
  std::uint64_t next_due_ns() const;
  // Returns the actions decided since the last call, in order.
  Actions take_actions();

  const std::map<std::uint64_t, Group>& groups() const;
  // Groups that the session is in, or waits for.
  std::uint32_t memberships(SessionId session) const;
  // The number of nodes that are remembered, including the last lost ones.
  std::size_t num_nodes() const;

 private:
  struct Parts;

  Group& put(Group group);

  void tick_group(Group& group);
  void follow_up();

  const std::unique_ptr<Parts> parts_;
};

}  // namespace epd::membership
