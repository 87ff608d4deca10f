// An agent's knowledge of the groups that its node takes part in: their descriptions, the state of its own
// engines, and its own ranks.
#pragma once

#include "membership/group.h"
#include "membership/messages.h"

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace epd::membership {

// This node's part of a group, in the form that a registry of this node alone would have. Members and engines
// are the node's own, under kLocalNode. The phase is what is known of it here. A member is kJoining until its
// join is answered.
struct NearGroup : Group {
  std::vector<RankDescription> ranks;     // all, as they were told
  std::vector<FarEngine> far_engines;     // those that serve a living rank
  bool started = false;                   // an engine here has been told of it
  bool failed = false;                    // a fatal break has been told here
  std::set<std::uint32_t> starts_broken;  // devices whose engine was told of it during a break
  bool asks_break = false;                // an engine here has asked for one, and none has come
  // When an engine here last reported that it can't reach another engine of the group, if no break has come
  // since. It repeats the report as long as that lasts.
  std::optional<std::uint64_t> pair_lost_ns;

  // Whether everything here serves the group, and no answer is pending.
  bool is_steady() const;
  // Returns the engine of another node that serves the rank. Null: the rank is here, or lost.
  const FarEngine* far_engine_of(std::uint32_t rank) const;
  bool has_member(std::uint64_t session, std::uint32_t number) const;
  // For a registry that ends it.
  Group to_end() &&;
  void update_phase();

 private:
  bool starts() const;
};

class NearGroups {
 public:
  const std::map<std::uint64_t, NearGroup>& all() const { return groups_; }
  bool knows(std::uint64_t group_id) const { return groups_.contains(group_id); }
  NearGroup take(std::uint64_t group_id) { return std::move(groups_.extract(group_id).mapped()); }
  // Reports for a coordinator that does not know these groups.
  std::vector<GroupReport> steady() const;

  // Removes ranks whose join has no answer and that no engine here has been told of.
  std::vector<ReleaseMemory> take_unannounced();

  // An action is about to be carried out.
  void decided(const Action& action, const JoinRequest* request, std::uint64_t now_ns);
  // The node reports an event.
  void said(const Event& event, std::uint64_t now_ns);

 private:
  template <typename T>
  void take(const T& message);  // an action, or an event
  template <typename T>
  void follow(const T&) {}
  void follow(const StartGroup& action);
  void follow(const SendRank& action);
  void follow(const SendMember& action);
  void follow(const SendFarEngine& action);
  void follow(const SendStopMember& action);
  void follow(const SendBreak& action);
  void follow(const SendResume& action);
  void follow(const SendRemoveGroup& action);
  void follow(const ReleaseMemory& action);
  void follow(const MarkLost& action);
  void follow(const ReplyJoined& action);
  void follow(const ReplyLeft& action);
  void follow(const MemoryAcquired& event);
  void follow(const SessionClosed& event);
  void follow(const EngineDown& event);
  void follow(const GroupReady& event);
  void follow(const GroupWaits& event);
  void follow(const Resumed& event);
  void follow(const MemberStopped& event);
  void follow(const BreakRequested& event);
  void follow(const Broken& event);
  void follow(const GroupRemoved& event);
  void follow(const PeerLost& event, std::uint64_t now_ns);

  NearGroup* find(std::uint64_t group_id);
  EngineSlot* find_slot(std::uint64_t group_id, EngineId engine);
  Member* find_member(std::uint64_t group_id, std::uint32_t rank);
  void keep_boards(const std::vector<BoardIndex>& boards);
  void forget_unused(std::uint64_t group_id);

  std::map<std::uint64_t, NearGroup> groups_;
};

}  // namespace epd::membership
