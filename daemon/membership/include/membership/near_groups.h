// What an agent knows of the groups that its node takes part in: what it has been told, how far its engines
// are, and who its own ranks are.
#pragma once

#include "membership/group.h"
#include "membership/messages.h"

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace epd::membership {

// This node's part of a group, as a registry of this node alone would have it: members and engines are its
// own, under kLocalNode, and its phase is what is known of it here. A member is kJoining until its join is
// answered.
struct NearGroup : Group {
  std::vector<RankDescription> ranks;     // all, as they were told
  std::vector<FarEngine> far_engines;     // those that serve a living rank
  bool started = false;                   // an engine here has been told of it
  bool failed = false;                    // a fatal break has been told here
  std::set<std::uint32_t> starts_broken;  // devices whose engine has been told of it amid a break
  bool asks_break = false;                // an engine here has asked for one, and none has come
  // When an engine here said last that it can't reach another of the group, and no break has come. It says so
  // again as long as that lasts.
  std::optional<std::uint64_t> pair_lost_ns;

  // Everything here serves the group, and nothing is owed.
  bool is_steady() const;
  // The engine of another node that serves the rank. Null: it is here, or nowhere.
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
  // What is to be said to a coordinator that knows nothing of them.
  std::vector<GroupReport> steady() const;

  // Ranks whose join has no answer and of which no engine here has been told.
  std::vector<ReleaseMemory> take_unannounced();

  // What is about to be carried out.
  void decided(const Action& action, const JoinRequest* request, std::uint64_t now_ns);
  // What the node says.
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
