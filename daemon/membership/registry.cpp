#include "membership/registry.h"

#include "breaks.h"
#include "departures.h"
#include "engines.h"
#include "forming.h"
#include "joins.h"
#include "steps.h"
#include "tables.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace epd::membership {

// Each part calls only those above it.
struct GroupRegistry::Parts {
  Parts(const Clock& clock, const MembershipLimits& limits, const std::optional<Spanning>& spanning)
      : desk(clock, limits, spanning),
        groups(spanning ? spanning->first_group_id : 1,
               spanning ? spanning->taken_group_ids : std::set<std::uint64_t>()),
        memberships(spanning ? spanning->first_member_index : 0) {}

  void on(const NodeUp& event) { nodes.node_up(event); }
  void on(const NodeLost& event) {
    pairs.node_lost(event.node);
    departures.on(event);
  }
  void on(const NodeDrains& event) { joins.on(event); }
  void on(const MemoryAcquired& event) { joins.on(event); }
  void on(const JoinRequest& event) {
    if (desk.expect(event.id)) joins.join(event);
  }
  void on(const LeaveRequest& event) {
    if (desk.expect(event.id)) departures.on(event);
  }
  void on(const SessionClosed& event) { departures.on(event); }
  void on(const EvictRank& event) { departures.on(event); }
  void on(const RankRefused& event) { departures.on(event); }
  void on(const EngineUp& event) { engines.on(event); }
  void on(const EngineDown& event) { engines.on(event); }
  void on(const GroupReady& event) { engines.on(event); }
  void on(const GroupWaits& event) { engines.on(event); }
  void on(const Resumed& event) { engines.on(event); }
  void on(const MemberStopped& event) { breaks.on(event); }
  void on(const BreakRequested& event) {
    if (!departures.lose_late(event)) breaks.on(event);
  }
  void on(const Broken& event) { breaks.on(event); }
  void on(const GroupRemoved& event) { breaks.on(event); }
  void on(const PeerLost& event) { pairs.on(event); }

  Desk desk;
  Nodes nodes;
  GroupTable groups;
  Memberships memberships;
  Members members{desk, nodes, memberships};
  Steps steps{desk, nodes};
  Breaks breaks{desk, groups, members, steps};
  Arrivals arrivals{desk, nodes, memberships, members};
  Forming forming{desk, {arrivals, members, steps, breaks}};
  Rejoins rejoins{desk, nodes, arrivals, steps, breaks};
  Joins joins{desk, groups, arrivals, forming, rejoins};
  Departures departures{desk, {groups, nodes, memberships, members, breaks, forming, rejoins, joins}};
  Pairs pairs{desk, groups, nodes, breaks, departures};
  Engines engines{desk, {groups, nodes, members, steps, breaks, forming, rejoins, departures, pairs}};
};

GroupRegistry::GroupRegistry(const Clock& clock, const MembershipLimits& limits,
                             std::optional<Spanning> spanning)
    : parts_(std::make_unique<Parts>(clock, limits, spanning)) {}

GroupRegistry::~GroupRegistry() = default;

void GroupRegistry::set_limits(const MembershipLimits& limits) {
  parts_->desk.set_limits(limits);
}

Actions GroupRegistry::take_actions() {
  return parts_->desk.take_actions();
}

const std::map<std::uint64_t, Group>& GroupRegistry::groups() const {
  return parts_->groups.all();
}

void GroupRegistry::handle(const Event& event) {
  const std::uint32_t* node = node_of(event);
  if (node != nullptr && parts_->desk.is_lost(*node)) return;
  std::visit([this](const auto& of) { parts_->on(of); }, event);
  follow_up();
}

Group& GroupRegistry::put(Group group) {
  Group& here = parts_->groups.put(std::move(group));
  if (!here.members.empty()) here.sole_node = here.members.begin()->second.session.node;
  for (const auto& [rank, member] : here.members) {
    if (member.session.node != here.sole_node) here.sole_node = 0;
    // 0: its number has not been told.
    if (member.member != 0) parts_->memberships.adopt(member.session, member.member, here.id, rank);
  }
  return here;
}

void GroupRegistry::adopt(Group group) {
  put(std::move(group));
}

void GroupRegistry::adopt_to_end(Group group, BreakReason reason) {
  Group& here = put(std::move(group));
  const std::uint64_t due_ns = parts_->desk.due_in_ms(parts_->desk.limits().engine_ack_ms);
  for (auto& [engine, slot] : here.engines)
    std::visit(
        [due_ns](auto& state) {
          if constexpr (requires { state.due_ns; }) state.due_ns = due_ns;
        },
        slot.state);
  for (auto& [rank, member] : here.members) {
    if (auto* stopping = std::get_if<Member::Stopping>(&member.calls)) stopping->due_ns = due_ns;
  }
  if (here.is(GroupPhase::kStarting)) {
    parts_->breaks.remove(here);  // no client knows of it yet
  } else {
    parts_->breaks.fail(here, std::move(reason), 0);
    parts_->breaks.advance(here);
  }
  follow_up();
}

// Admits joins that waited: for a group to resume, or for one to fail and free its name.
void GroupRegistry::follow_up() {
  for (;;) {
    const std::vector<std::uint64_t> resumed = parts_->breaks.take_resumed();
    const std::vector<JoinRequest> homeless = parts_->breaks.take_homeless();
    if (resumed.empty() && homeless.empty()) return;
    for (const std::uint64_t id : resumed) {
      Group* group = parts_->groups.find(id);
      if (group != nullptr) parts_->rejoins.admit(*group);
    }
    for (const JoinRequest& request : homeless) parts_->joins.join(request);
  }
}

void GroupRegistry::tick() {
  parts_->joins.tick();
  parts_->pairs.tick();
  for (const std::uint64_t id : parts_->groups.ids()) {
    Group* group = parts_->groups.find(id);
    if (group != nullptr) tick_group(*group);
  }
  follow_up();
}

void GroupRegistry::tick_group(Group& group) {
  const auto* starting = std::get_if<Group::Starting>(&group.state);
  if (group.is(GroupPhase::kForming) || (starting != nullptr && starting->due_ns <= parts_->desk.now_ns())) {
    parts_->forming.tick(group);
    return;
  }
  const std::uint64_t id = group.id;
  parts_->engines.tick(group);
  if (parts_->groups.find(id) != nullptr) parts_->departures.expire_rejoins(group);
}

std::uint64_t GroupRegistry::next_due_ns() const {
  std::uint64_t due = std::min(parts_->joins.next_due_ns(), parts_->pairs.next_due_ns());
  const auto consider = [&due](std::uint64_t candidate) { due = std::min(due, candidate); };
  for (const auto& [id, group] : groups()) {
    for (const auto& [rank, member] : group.members) {
      if (group.is(GroupPhase::kForming) || member.presence == Presence::kJoining)
        consider(member.join_due_ns);
      if (const auto* stopping = std::get_if<Member::Stopping>(&member.calls)) consider(stopping->due_ns);
    }
    for (const auto& [rank, arrival] : group.arrivals) consider(arrival.member.join_due_ns);
    for (const auto& [engine, slot] : group.engines) {
      if (const std::uint64_t* answer = slot.due_ns()) consider(*answer);
    }
    if (const auto* starting = std::get_if<Group::Starting>(&group.state)) consider(starting->due_ns);
    for (const WaitingJoin& join : group.waiting) consider(join.due_ns);
    for (const auto& [rank, join] : group.asked) consider(join.due_ns);
    const auto* breaking = std::get_if<Group::Breaking>(&group.state);
    if (breaking != nullptr && breaking->release_due_ns > parts_->desk.now_ns())
      consider(breaking->release_due_ns);
  }
  return due;
}

std::size_t GroupRegistry::num_nodes() const {
  return parts_->nodes.num_known();
}

std::uint32_t GroupRegistry::memberships(SessionId session) const {
  const std::vector<Memberships::Place> places = parts_->memberships.of(session);
  const auto present = [this](const Memberships::Place& place) {
    return groups().at(place.group_id).holder(place.rank) != nullptr;
  };
  return static_cast<std::uint32_t>(std::count_if(places.begin(), places.end(), present));
}

}  // namespace epd::membership
