// How the application's streams wait for the library's operations, and the thread that unblocks them if the
// daemon is gone. See README, "Streams".
#pragma once

#include "connection.h"
#include "device.h"
#include "group.h"

#include <condition_variable>
#include <thread>
#include <vector>

namespace epd::client {

// Unblocks streams by writing words in the group's memory.
class Unblocker {
 public:
  virtual ~Unblocker() = default;
  // Without the mutex. Unblocks all streams that wait for the group's operations.
  virtual void unblock(const Group& group) = 0;
  // Without the mutex. Called twice a second while engines have memory of the application's mapped, and when
  // rows have been copied.
  virtual void look_at_memory() {}
};

// The work of a stream after the end of an operation that was enqueued.
struct Following {
  abi::Op op = abi::Op::kNone;
  std::uint32_t slot = 0;
  std::uintptr_t flag = 0;  // the word that a MEMOP wait waits for
  epd_ticket_t ticket = 0;
  stream_kernels::Copies copies;
};

class StreamPort {
 public:
  // No device: a session on a host device, which has no streams.
  StreamPort(Device* device, WaitBy wait_by, Connection& connection, Waits& waits, Unblocker& unblocker)
      : device_(device), wait_by_(wait_by), connection_(connection), waits_(waits), unblocker_(unblocker) {}
  Status prepare();  // once, before anything else: what can fail

  // Not in sessions on host devices.
  Device& device() const { return *device_; }
  bool exists() const { return device_ != nullptr; }
  // How streams wait for the group's operations: as the session has chosen. But where ranks of the group
  // share a GPU they wait by memory operations: a kernel that waits there may hold the GPU that another rank
  // needs before it can end the wait.
  WaitBy wait_by(const Group& group) const {
    return wait_by_ == WaitBy::kKernel && !group.shares_device ? WaitBy::kKernel : WaitBy::kMemop;
  }
  // Makes later work of the stream wait for an operation that was enqueued, and then for its outputs, by a
  // MEMOP wait. If the session has events, the slot's event completes with that from then on, unless the
  // stream captures.
  Status wait_after(Group& group, void* stream, const Following& its);
  // Waits for the event of an operation whose outputs have been enqueued already, if it still has one.
  Status wait_for_copies(Group& group, void* stream, std::uint32_t slot, epd_ticket_t ticket);
  // Makes the events of the slots of a group that is being joined, if the session has events.
  Status make_events(Group& group) const;
  // epd_ticket_event
  Status event_of(const Group& group, epd_ticket_t ticket, void*& event);

  // ---- the watch. With the mutex
  Status start_watch_locked();
  void kick_watch() const;  // there is news for it
  void add_locked(Group& group) { groups_.push_back(&group); }
  // No operation of the group is enqueued after this: it is left, or the session has ended.
  void want_unblock_locked(Group& group);
  void want_unblocks_locked();  // of all groups
  // Waits until the streams of all groups that must be unblocked are.
  void await_unblocks(Lock& lock);

  // Returns when no stream can wait in the group's memory. The watch does not look at the group after this.
  void remove(Group& group);
  void stop_watch();

 private:
  bool has_events() const { return exists() && wait_by_ == WaitBy::kEvent; }
  Status wait_and_copy(const Group& group, void* stream, const Following& its);
  Status wait_with_event(Group& group, void* stream, const Following& its);
  void watch();
  bool unblock_a_group(Lock& lock);  // false: none wants it
  bool any_unblocked_locked() const;
  bool any_mapped_locked() const;
  void want_unblocks_again_locked();

  Device* const device_;
  const WaitBy wait_by_;
  Connection& connection_;
  Waits& waits_;
  Unblocker& unblocker_;
  UniqueFd watch_wake_;  // an eventfd that wakes the watch thread

  // Guarded by the mutex.
  std::vector<Group*> groups_;
  std::thread watch_thread_;  // from the first operation on a stream to detach
  std::condition_variable unblocked_;
  bool watch_stopping_ = false;
};

// The error of a call that fails although it has submitted an operation.
Status submitted_but(const Status& status, epd_ticket_t ticket, const char* what);

}  // namespace epd::client
