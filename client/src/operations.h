// The operations of a session: how they reach the device, and how callers wait for them. Each is a call in a
// ring, which the device takes. It writes their results where the library reads them. See README, "Calls".
#pragma once

#include "call_medium.h"
#include "group.h"
#include "hooks.h"
#include "mapped_memory.h"
#include "stream_port.h"

#include <memory>
#include <utility>
#include <vector>

namespace epd::client {

struct SubmitRequest {
  abi::Op op = abi::Op::kNone;
  std::uint32_t slot = 0;
  std::uint32_t num_tokens = 0;
  std::uint32_t flags = 0;       // abi::OpFlags but for those of fields below
  std::uint32_t row_format = 0;  // dispatch
  std::uint32_t timeout_ms = 0;
  std::uint32_t sms = 0;
  epd_handle_t handle = 0;                       // of a combine, or of a dispatch under a handle
  bool keep = false;                             // dispatch: keep_handle
  StreamUse stream = {};                         // GPUs; a CUstream
  const std::uint32_t* num_tokens_at = nullptr;  // GPUs, in a stream: device memory
  const epd_memory_t* memory = nullptr;          // in place of regions

  bool deferred() const { return (flags & abi::kFlagDefer) != 0; }
};

// The routing record that an operation uses.
struct RouteUse {
  std::uint32_t route = kNoRoute;
  bool writes = false;
};

// The plan for the rows of one call: in place or copied.
struct RowPlan {
  RowMemory memory;       // where they lie
  bool captured = false;  // a stream captures the call
  abi::RowPlaces places;  // 0: they are copied
};

// How a call has ended.
struct CallOutcome {
  Status status;
  epd_result_t result{};
  std::uint32_t runs = 0;
};

// Any thread may call, without the mutex, except functions with _locked.
class Operations {
 public:
  Operations(const abi::Welcome& welcome, Waits& waits, Connection& connection, Hooks& hooks,
             StreamPort& streams, MemoryMapper& mapper, std::unique_ptr<CallMedium> medium)
      : welcome_(welcome),
        waits_(waits),
        connection_(connection),
        hooks_(hooks),
        streams_(streams),
        mapper_(mapper),
        medium_(std::move(medium)) {}

  // ---- what callers ask. The text of a failed operation comes back in the status
  Status submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                epd_handle_t* handle);  // *handle of a dispatch may be null
  Status release_handle(Group& group, epd_handle_t handle);
  Status check(Group& group, epd_progress_t& progress);
  Status wait(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_result_t* result);
  bool pending(Group& group, epd_ticket_t ticket);
  Status counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_counts_t& counts);
  Status wait_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms);
  Status wait_on_stream(Group& group, epd_ticket_t ticket, void* stream);
  Status on_complete(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user);
  Status drop(Group& group, epd_ticket_t ticket);
  // Before an operation's hook is called.
  void finish_outputs(Group& group, std::uint32_t slot, epd_ticket_t ticket);

  // ---- memberships
  // How many descriptors come with a join: the user arena, the board, and the results.
  static constexpr std::size_t kDescriptors = 3;
  // Once, before any other thread sees the group.
  Status open(Group& group, const Packet& joined);
  // The group has a new epoch. Afterwards renew() is called until it is OK.
  // Handles name records, so a new epoch does not change them. But what they counted may be a failed
  // dispatch's.
  void begin_epoch_locked(Group& group) { group.forget_counts(); }
  Status renew(Group& group, Deadline deadline);
  // Whether one that the host began has not ended, though its deadline has passed: its engine is stopped.
  bool overdue_locked(Group& group);
  // Whether a call of the group's epoch is known to have failed. Host devices only.
  bool failed_locked(Group& group) const;
  void forget_locked(const Group& group);
  void unblock(const Group& group);  // see Unblocker

  // ---- see HookSource
  bool take_hooked_locked();
  // Checks from time to time whether work still runs in the context.
  void look_at_device();

 private:
  // Making calls, in make_calls.cpp.
  struct MadeCall {
    RouteUse use;
    epd_ticket_t ticket = 0;
    abi::Call call;
    stream_kernels::Copies copies;
    RowPlan rows;
    std::uint64_t limit_ns = 0;  // how long a kernel waits for its end
    Status bell_set;             // of a call of the host that is in the ring
  };
  Status check_stream(const SubmitRequest& request, bool& captured) const;
  Status prepare_call(Lock& lock, Group& group, const SubmitRequest& request, MadeCall& made);
  bool await_discarded(Lock& lock, Group& group, Deadline deadline);
  Status admit_host_call(Lock& lock, Group& group, const SubmitRequest& request);
  Status admit_stream_call(Lock& lock, Group& group, const SubmitRequest& request);
  Status check_on_host(Lock& lock, Group& group, const SubmitRequest& request, std::uint32_t route);
  // Takes a free record for a handle that is to be kept.
  static Status choose_route(Group& group, const SubmitRequest& request, RouteUse& use);
  Status enqueue(Group& group, const SubmitRequest& request, MadeCall& made);
  Status await_and_copy(Group& group, void* stream, abi::Op op, std::uint32_t slot, std::uint64_t limit_ns,
                        const stream_kernels::Copies& copies);
  Status write_epoch(Group& group, std::uint64_t epoch);

  // The host copies if there is no stream. The slot's last call has ended. Callers hold submit_mutex.
  void copy_by_host(Group& group, std::uint32_t slot, const MadeCall& made);
  void copy_outputs(Group& group, std::uint32_t slot);

  // How calls end.
  Status usable_locked(const Group& group);
  Status unknown_locked(epd_ticket_t ticket) const;
  bool ended_locked(const Group& group, KnownCall& call, CallOutcome& out) const;
  bool missed_locked(const Group& group, KnownCall& call, bool failed, CallOutcome& out) const;
  // `there`: without the mutex, whether done() may be true.
  template <typename Done, typename There>
  bool look_until(Lock& lock, Deadline deadline, Done done, There there);
  template <typename Done>
  bool poll_until(Lock& lock, Deadline deadline, Done done);
  template <typename Look>
  Status look_at_call(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, const char* not_there,
                      Look look);

  const abi::Welcome& welcome_;
  Waits& waits_;
  Connection& connection_;
  Hooks& hooks_;
  StreamPort& streams_;
  MemoryMapper& mapper_;
  const std::unique_ptr<CallMedium> medium_;

  // Guarded by the mutex.
  std::vector<Group*> groups_;
  std::vector<std::pair<Group*, epd_ticket_t>> hooked_;  // calls that have hooks
  Status device_status_;                                 // not OK: nothing runs in the context
  SteadyClock::time_point last_device_look_{};
};

}  // namespace epd::client
