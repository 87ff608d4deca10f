// A session: one connection to the daemon, its parts, and the groups that it has joined. See README,
// "Inside".
//
// Threads. Any thread may call. The mutex of Waits guards all state. It is taken after a group's
// submit_mutex. No mutex is held while sleeping. Calls of the driver are made without the mutex, but may hold
// submit_mutex.
#pragma once

#include "attach.h"
#include "connection.h"
#include "group.h"
#include "handle.h"
#include "home_process.h"
#include "hooks.h"
#include "operations.h"
#include "stream_port.h"
#include "waits.h"

#include <list>
#include <memory>
#include <optional>
#include <vector>

namespace epd::client {

// How long leave waits for the daemon's answer.
inline constexpr std::int64_t kLeaveMs = 5'000;
// The daemon has the same deadline for a join. Its answer may arrive this much later.
inline constexpr std::int64_t kReplyMarginMs = 5'000;
// The wait for a join without timeout_ms, because the client does not know the daemon's default.
inline constexpr std::int64_t kLongestJoinMs = 600'000;

class Session final : News, ConnectionEvents, HookSource, Unblocker {
 public:
  explicit Session(Attachment attachment);
  // Leaves all groups and ends operations in flight. Returns when the hooks have run. Not from a hook.
  ~Session() override;
  Status prepare();  // once, before anything else: what can fail

  // OK, or INVALID_ARGUMENT in a process that was forked off the one that attached. Takes no lock, because a
  // lock might be held for ever there.
  Status in_home_process() const;
  epd_session_info_t info() const;
  Status check();
  bool in_hook_thread() const { return hooks_.in_thread(); }
  Operations& operations() { return operations_; }
  StreamPort& streams() { return streams_; }

  Status join(const epd_group_config_t& config, Group*& group);
  // Frees the group once its hooks have run. Not from a hook.
  void leave(Group* group, Deadline deadline);
  // epd_group_advance. result.size is 0 before, and afterwards unless the operation has ended.
  Status advance(Group& group, epd_ticket_t& ticket, std::int32_t timeout_ms, epd_result_t& result,
                 epd_resume_info_t& info);
  // Late ranks come back. If this is one of them, its handle names another group afterwards. Not from a hook.
  Status restore(Group& group, std::int32_t timeout_ms, epd_resume_info_t& info);
  // For all groups, and those that are joined later.
  Status register_memory(const void* address, std::uint64_t bytes);
  // For all groups.
  Status unregister_memory(const void* address);

  // The handle that the caller has; set once, when the session is made.
  Handle<Session>* given = nullptr;

 private:
  std::vector<Group*> all_groups();
  // Rows in memory that can't be mapped are copied.
  void map_registered(Group& group);
  void watch_memory();
  // former: the membership of this rank before it was late, or null. Its memory's addresses stay on host
  // devices.
  Status adopt_joined(Packet& packet, Group& group, Group* former = nullptr);
  Status map_user_arena(const UniqueFd& fd, Group& group, Group* former);
  Status map_board(const UniqueFd& fd, Group& group, Group* former);
  Status may_restore(Group& group);
  Status come_back(Group& former, Packet& reply, epd_resume_info_t& info);
  // Ends its operations; returns when its hooks have run.
  void end_operations(Group& group);
  // Waits for the epoch or a later one.
  Status resume(Group& group, std::int32_t timeout_ms, Deadline deadline, std::uint64_t epoch,
                epd_resume_info_t& info);
  // Ends its operations and unblocks its streams. No submission follows.
  void begin_leave_locked(Group& group);
  Status take_epoch(Group& group, std::int32_t timeout_ms, Deadline deadline, std::uint64_t epoch,
                    epd_resume_info_t& info);

  // The interfaces that the parts use.
  void note_end_locked() override { connection_.note_end_locked(); }
  void look_at_socket() noexcept override { connection_.look_at_socket(); }
  void probe() override { connection_.probe(); }
  void on_end_locked() override;
  void on_late_join_locked() override;
  bool take_hooked_locked() override { return operations_.take_hooked_locked(); }
  bool awaits_packets_locked() const override { return connection_.awaits_late_join_locked(); }
  void finish_outputs(const HookCall& call) override {
    operations_.finish_outputs(*call.group, call.slot, call.outputs_of);
  }
  void look_at_device() override { operations_.look_at_device(); }
  void unblock(const Group& group) override { operations_.unblock(group); }
  void look_at_memory() override {
    mapper_.unmap_freed(groups_);
    mapper_.tell_counts(groups_);
  }

  Attachment attachment_;
  HomeProcess home_;
  Waits waits_;
  Connection connection_;
  Hooks hooks_;
  StreamPort streams_;
  MemoryMapper mapper_;
  Operations operations_;
  // Guarded by the mutex.
  std::list<std::unique_ptr<Group>> groups_;
  SessionRegistered registered_;
};

}  // namespace epd::client
