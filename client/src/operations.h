// The operations of a session: how they reach the device, and how callers wait for them. On a host device
// SubmittedOperations submits through a ring to the engine, which completes them. On a GPU CallOperations
// makes calls, which the engine's kernels take from a ring.
#pragma once

#include "group.h"
#include "hooks.h"
#include "stream_port.h"

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

// Checks what the group's shape alone decides.
Status check_request(const Group& group, const SubmitRequest& request);
// Flags as the engine accepts them. It ends sessions for flags that have no meaning.
std::uint32_t engine_flags(const abi::GroupShape& shape, const SubmitRequest& request);
// The error when no record is free for a kept handle.
Status no_handle_left(const Group& group);

// The routing record that an operation uses.
struct RouteUse {
  std::uint32_t route = kNoRoute;
  bool writes = false;
};

// Any thread may call, without the mutex, except functions with _locked.
class Operations {
 public:
  virtual ~Operations() = default;

  // ---- what callers ask. The text of a failed operation comes back in the status
  virtual Status submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                        epd_handle_t* handle) = 0;  // *handle of a dispatch may be null
  virtual Status release_handle(Group& group, epd_handle_t handle) = 0;
  virtual Status check(Group& group, epd_progress_t& progress) = 0;
  virtual Status wait(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_result_t* result) = 0;
  virtual bool pending(Group& group, epd_ticket_t ticket) = 0;
  virtual Status counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_counts_t& counts) = 0;
  virtual Status wait_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms) = 0;
  virtual Status wait_on_stream(Group& group, epd_ticket_t ticket, void* stream) = 0;
  virtual Status on_complete(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user) = 0;
  virtual Status drop(Group& group, epd_ticket_t ticket) = 0;
  // Before an operation's hook is called.
  virtual void finish_outputs(Group& group, std::uint32_t slot, epd_ticket_t ticket) = 0;

  // ---- memberships
  // How many descriptors come with a join: the user arena, the board, and those for open().
  virtual std::size_t num_descriptors() const = 0;
  // Once, before any other thread sees the group.
  virtual Status open(Group& group, const Packet& joined) = 0;
  // The group has a new epoch. Afterwards renew() is called until it is OK.
  virtual void begin_epoch_locked(Group& group) = 0;
  virtual Status renew(Group& group) = 0;
  // Whether one that the host began has not ended, though its deadline has passed: its engine is stopped.
  virtual bool overdue_locked(Group& group) = 0;
  // Ends operations in flight: all, or those of one group.
  virtual void abort_locked(StatusCode code, const char* text, const Group* only) noexcept = 0;
  virtual void forget_locked(const Group& group) = 0;
  virtual void unblock(const Group& group) = 0;  // see Unblocker

  // ---- see News and HookSource
  virtual bool has_news() const = 0;
  virtual bool take_news_locked() = 0;
  virtual bool take_hooked_locked() = 0;
  virtual void look_at_device() = 0;
};

}  // namespace epd::client
