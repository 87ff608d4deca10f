// The break protocol: groups break, fail, resume, and are forgotten. README of daemon/ draws it.
#pragma once

#include "steps.h"
#include "tables.h"

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace epd::membership {

class Breaks {
 public:
  Breaks(Desk& desk, GroupTable& groups, Members& members, Steps& steps)
      : desk_(desk), groups_(groups), members_(members), steps_(steps) {}

  void on(const MemberStopped& event);
  void on(const BreakRequested& event);
  void on(const Broken& event);
  void on(const GroupRemoved& event);

  // Returns the active group that the engine asks to break. Null: there is none.
  Group* asked(const BreakRequested& event);
  static BreakReason reason_of(const Group& group, const abi::Break& message);

  // Recoverable. `changed`: ranks that have come or gone.
  void begin(Group& group, BreakReason reason, std::set<std::uint32_t> changed = {});
  // Fatal. `fail_from` 0: nothing runs any more.
  void fail(Group& group, BreakReason reason, std::uint64_t fail_from = kNever);
  // Fails operations that were to be completed: one of them can't be, or takes too long.
  void fail_everything(Group& group);
  // Moves a breaking group on as far as the answers allow. May forget the group.
  void advance(Group& group);
  // The engine has forgotten the group, or has died before it had. A rank that has come since is told to it
  // again.
  void slot_free(Group& group, EngineId engine);
  // The following may forget the group.
  void remove(Group& group);
  void remove_if_empty(Group& group);
  void forget_if_removed(Group& group);
  void forget(Group& group);

  // Groups that have gone on, for ranks that wait for it.
  std::vector<std::uint64_t> take_resumed() { return std::exchange(resumed_, {}); }
  // Joins that waited for groups that have failed; the next groups of their names may take them.
  std::vector<JoinRequest> take_homeless() { return std::exchange(homeless_, {}); }

 private:
  void advance_recoverable(Group& group);
  void advance_fatal(Group& group);
  void resume(Group& group);
  void apply_changes(Group& group, const std::set<std::uint32_t>& changed);
  void send_fatal(Group& group, Group::Failing& failing);
  void refuse_joining(Group& group);
  void refuse_asked(Group& group);
  void become_lost(Group& group);

  Desk& desk_;
  GroupTable& groups_;
  Members& members_;
  Steps& steps_;
  std::vector<std::uint64_t> resumed_;
  std::vector<JoinRequest> homeless_;
};

}  // namespace epd::membership
