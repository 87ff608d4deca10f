// The groups that this engine serves, from kGroupBegin to kGroupRemoved. Ranks join and leave. Groups begin,
// break and continue as the supervisor orders. Nothing here blocks: a pending answer is sent in the round in
// which its condition is met.
#pragma once

#include "far_engines.h"
#include "journals.h"
#include "ranks.h"
#include "sessions.h"
#include "starts.h"

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace epd::engine {

class Groups {
 public:
  Groups(device::Device& device, Page& page, SupervisorLink& link, Sessions& sessions,
         FarEngines& far_engines, const RoundClock& clock);

  // Messages of the supervisor while a group forms.
  Status begin_group(const abi::GroupBegin& message);
  Status add_rank(Packet& packet);
  Status add_member(Packet& packet);
  Status map_memory(Packet& packet);
  Status commit_group(const abi::GroupRef& message);
  Status apply_settings(const abi::GroupSettings& message);
  // Messages of the break protocol (daemon/README): a group halts, continues, or ends.
  Status stop_member(const abi::MemberRef& message);
  Status break_group(const abi::Break& message);
  Status resume_group(const abi::Resume& message);
  Status release_group(const abi::GroupRef& message);
  Status remove_group(const abi::GroupRef& message);
  Status close_streams(Packet& packet) { return ranks_.close_streams(packet); }

  // The timeout of calls that give none.
  void set_defaults(std::uint32_t timeout_ms, std::uint32_t linger_us);

  // Called in each round, before and after the device has continued. True: there was something to do.
  bool read_journals();
  void advance();
  // Frees a share of the memory that is no longer used. True: there was some.
  bool reclaim();
  // Whether a round would find work for these.
  bool pending() const { return !reclaimer_.empty() || journals_.pending(); }
  std::uint64_t next_look_ns(std::uint64_t now_ns) const { return journals_.next_look_ns(now_ns); }

  // At the end of the engine: ends calls. Groups are forgotten when the device has left everything.
  void halt();
  bool settled() const;
  void clear();

 private:
  Group* find(std::uint64_t id) const;
  void refuse_rank(Group& group, std::uint32_t rank, const Status& status);
  void drop_member(Group& group, std::uint32_t rank);
  void end_member(Member& member);
  void break_restored(Group& group);
  Status begin_far(Group& group);
  void end_far(const Group& group);
  void start_calls(const Group& group, bool fresh);
  void follow_settings(const Group& group) const;
  void answer_stops();
  void acknowledge_break(Group& group);
  void give_up_memory(Group& group);
  void finish_removals();

  device::Device& device_;
  SupervisorLink& link_;
  Sessions& sessions_;
  FarEngines& far_engines_;
  const RoundClock& clock_;
  Reclaimer reclaimer_;
  Ranks ranks_;
  Journals journals_;
  Starts starts_;
  std::map<std::uint64_t, std::unique_ptr<Group>> groups_;
  std::vector<abi::MemberRef> stops_;  // still to be answered
  std::uint32_t default_timeout_ms_ = 30'000;
  std::uint32_t default_linger_us_ = 0;
};

}  // namespace epd::engine
