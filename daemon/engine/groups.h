// The groups that this engine serves, from kGroupBegin to kGroupRemoved: their ranks come and go, and they
// begin, break and go on as the supervisor says. Nothing here waits: an answer that is owed goes out in the
// round that finds what it waited for.
#pragma once

#include "far_engines.h"
#include "journals.h"
#include "operations.h"
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
  Groups(device::Device& device, Page& page, SupervisorLink& link, Sessions& sessions, Operations& operations,
         FarEngines& far_engines, const RoundClock& clock);

  // The supervisor's messages: a group forms.
  Status begin_group(const abi::GroupBegin& message);
  Status add_rank(Packet& packet);
  Status add_member(Packet& packet);
  Status commit_group(const abi::GroupRef& message);
  Status apply_settings(const abi::GroupSettings& message);
  // It stands still, goes on, or ends (daemon/README, the break protocol).
  Status stop_member(const abi::MemberRef& message);
  Status break_group(const abi::Break& message);
  Status resume_group(const abi::Resume& message);
  Status release_group(const abi::GroupRef& message);
  Status remove_group(const abi::GroupRef& message);
  Status close_streams(Packet& packet) { return ranks_.close_streams(packet); }

  // Of calls that name none.
  void set_default_timeout(std::uint32_t timeout_ms);

  // In each round, before and after the device has gone on. True: there was something.
  bool read_journals();
  void advance();
  // A round's share of memory that goes. True: there is some.
  bool reclaim();
  // Whether a round would find something of these.
  bool pending() const { return !reclaimer_.empty() || journals_.pending(); }
  std::uint64_t next_look_ns(std::uint64_t now_ns) const { return journals_.next_look_ns(now_ns); }

  // At the end of the engine: calls end; when the device has left all there is they are forgotten.
  void halt();
  bool settled() const;
  void clear();

 private:
  Group* find(std::uint64_t id) const;
  void refuse_rank(Group& group, std::uint32_t rank, const Status& status);
  void drop_member(Group& group, std::uint32_t rank);
  void end_member(Member& member, StatusCode status);
  void restore(Group& group);
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
  Operations& operations_;
  FarEngines& far_engines_;
  const RoundClock& clock_;
  Reclaimer reclaimer_;
  Ranks ranks_;
  Journals journals_;
  Starts starts_;
  std::map<std::uint64_t, std::unique_ptr<Group>> groups_;
  std::vector<abi::MemberRef> stops_;  // to be answered
  std::uint32_t default_timeout_ms_ = 30'000;
};

}  // namespace epd::engine
