// The engine: one loop that takes submissions, steps operations and obeys the supervisor. One
// thread; helpers of the device only run pieces of operations.
#pragma once

#include "device/device.h"
#include "device_watch.h"
#include "group.h"
#include "operation.h"
#include "page.h"
#include "reclaimer.h"
#include "round_clock.h"
#include "schedule.h"
#include "session_port.h"
#include "supervisor_link.h"

#include <map>
#include <memory>

namespace epd {

class Engine {
 public:
  // The device's notify must ring the bell.
  Engine(SupervisorLink& link, Bell& bell, Page& page, std::unique_ptr<Device> device, const Clock& clock);
  ~Engine();

  // Until kStop or the end of the link. Returns the process's exit code.
  int run();

 private:
  // link.cpp: the supervisor's messages
  void listen();
  Status add_session(Packet& packet);
  Status remove_session(const abi::SessionRef& message);
  Status note_all_told(const abi::AllTold& message);
  Status begin_group(const abi::GroupBegin& message);
  Status commit_group(const abi::GroupRef& message);
  Status apply_settings(const abi::Settings& message);
  Status apply_group_settings(const abi::GroupSettings& message);
  Group* find_group(std::uint64_t id);
  Member* find_member(Group& group, std::uint32_t rank);

  // ranks.cpp: those of a group, and their memory
  Status add_rank(Packet& packet);
  Status map_rank(Group& group, const abi::GroupRank& message, const Packet& packet);
  Status map_client_memory(Group& group, const abi::GroupRank& message, const Packet& packet);
  void refuse_rank(Group& group, std::uint32_t rank, const Status& status);
  Status add_member(Packet& packet);
  Status open_lane(Group& group, Member& member);
  void clear_memory(const Group& group, const Member& member) const;
  void clear_signals(const Group& group) const;
  void drop_member(Group& group, std::uint32_t rank);
  void mask_rank(Group& group, std::uint32_t rank);
  Status add_peer(Group& group, const abi::GroupRank& message, Packet& packet);
  Status close_streams(Packet& packet);
  // Of a rank that this engine serves no more, though its memory is still mapped.
  void close_streams_of(const Member& member) const;

  // breaks.cpp: groups that stand still, go on, or end
  Status stop_member(const abi::MemberRef& message);
  Status break_group(const abi::Break& message);
  Status resume_group(const abi::Resume& message);
  Status release_group(const abi::GroupRef& message);
  Status remove_group(const abi::GroupRef& message);
  void finish_removals();
  void forget(Group& group);

  // submissions.cpp: from ring slot to operation
  bool poll_sessions();
  bool poll_session(SessionPort& session);
  void accept(SessionPort& session, const abi::Submission& submission);
  std::string illegal(const SessionPort& session, const abi::Submission& submission) const;
  abi::Completion answer(SessionPort& session, const abi::Submission& submission, StatusCode status);
  void answer_noop(SessionPort& session, const abi::Submission& submission, Member& member);
  void refuse(SessionPort& session, const abi::Submission& submission, Member& member);
  void end_session(SessionPort& session, const std::string& text);
  // The client's stream waits for an operation that nothing will run.
  void release_stream(const Member& member, const abi::Submission& submission);
  void finish(const Operation& operation, StatusCode status, const abi::Break& cause);

  // journals.cpp: commands
  bool read_journals();
  bool read_journal(Member& member);
  void read_entry(Member& member, const kernels::cuda::JournalEntry& entry);
  StatusCode fail_command(Member& member, const kernels::cuda::JournalEntry& entry);
  void halt_commands();
  bool commands_halted(const Group& group) const;
  void answer_stops();
  bool journal_pending() const;
  std::uint64_t next_journal_look_ns(std::uint64_t now) const;

  // starts.cpp: groups that begin when kernels do
  void start_commands(Member& member, bool fresh);
  void tell_limits(const Group& group);
  void owe_start(Group& group);
  void finish_starts();
  void start_group(Group& group);
  void say_waits(const Member& late);
  std::string holder_of_sms(const Group& group) const;

  // restart.cpp: what a former engine has left
  void catch_up(Member& member);
  void answer_orphans(Member& member, StatusCode status);
  bool answer_stray_orphans();

  // engine.cpp: the loop
  int leave();
  bool step_operations();
  bool take_turn(Schedule::Queue& queue, std::int32_t first, std::uint64_t until_ns);
  bool end_if_done(Operation& operation, StepResult result);
  StepResult step(Operation& operation, std::int32_t first);
  void request_break(Group& group, const abi::Break& failure);
  // Whenever the member's next operation has a new number: an epoch whose tags run out is ended.
  void renew_numbers(const Member& member);
  void finish_arrived(Group& group);
  void fail_operations(Group& group, std::uint64_t from, const abi::Break& cause);
  bool settled(const Group& group) const;
  void acknowledge_breaks();
  void give_up_memory(Group& group);
  bool reclaim();
  bool remove_sessions();
  bool spin();
  std::uint64_t spin_limit_ns() const;
  void grow_spin_budget();
  void sleep();
  void set_sleeping(bool sleeping);
  bool anything_pending();
  std::uint64_t next_look_ns(std::uint64_t now) const;

  SupervisorLink& link_;
  Bell& bell_;
  Page& page_;
  RoundClock clock_;
  const std::unique_ptr<Device> device_;
  DeviceWatch watch_;
  abi::Settings settings_{1, 30000, 50, 2};
  bool all_told_ = false;  // kAllTold has come
  std::uint64_t spin_budget_ns_ = 0;
  std::uint64_t last_link_ns_ = 0;
  std::uint64_t last_session_ = 0;     // whose ring was looked at last
  std::size_t idle_turns_ = 0;         // of sessions, one after another, in which nothing got on
  std::vector<abi::MemberRef> stops_;  // to be answered
  Reclaimer reclaimer_;
  std::map<std::uint32_t, std::weak_ptr<PeerEngine>> peers_;  // by device: those that groups have
  // Operations before the members they point to, and those before the sessions: destruction order.
  std::map<std::uint64_t, std::unique_ptr<SessionPort>> sessions_;
  std::map<std::uint64_t, std::unique_ptr<Group>> groups_;
  Schedule schedule_;
};

}  // namespace epd
