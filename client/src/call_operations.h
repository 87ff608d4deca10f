// How operations reach the device: as calls in a ring, which the device takes. It writes their results where
// the library reads them. See README, "Calls".
#pragma once

#include "call_medium.h"
#include "operations.h"

namespace epd::client {

// How a call has ended.
struct CallOutcome {
  Status status;
  epd_result_t result{};
  std::uint32_t runs = 0;
};

class CallOperations final : public Operations {
 public:
  CallOperations(const abi::Welcome& welcome, Waits& waits, Connection& connection, Hooks& hooks,
                 StreamPort& streams, std::unique_ptr<CallMedium> medium)
      : welcome_(welcome),
        waits_(waits),
        connection_(connection),
        hooks_(hooks),
        streams_(streams),
        medium_(std::move(medium)) {}

  Status submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket,
                epd_handle_t* handle) override;
  Status release_handle(Group& group, epd_handle_t handle) override;
  Status check(Group& group, epd_progress_t& progress) override;
  Status wait(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_result_t* result) override;
  bool pending(Group& group, epd_ticket_t ticket) override;
  Status counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_counts_t& counts) override;
  Status wait_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms) override;
  Status wait_on_stream(Group& group, epd_ticket_t ticket, void* stream) override;
  Status on_complete(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user) override;
  Status drop(Group& group, epd_ticket_t ticket) override;
  void finish_outputs(Group& group, std::uint32_t slot, epd_ticket_t ticket) override;

  std::size_t num_descriptors() const override { return 3; }
  Status open(Group& group, const Packet& joined) override;
  // Handles name records, so a new epoch does not change them. But what they counted may be a failed
  // dispatch's.
  void begin_epoch_locked(Group& group) override { group.forget_counts(); }
  Status renew(Group& group) override;
  // Nothing to do: each wait for a call sees by itself that its group or session has ended.
  bool overdue_locked(Group& group) override;
  void abort_locked(StatusCode /*code*/, const char* /*text*/, const Group* /*only*/) noexcept override {}
  void forget_locked(const Group& group) override;
  void unblock(const Group& group) override;

  bool has_news() const override { return false; }
  bool take_news_locked() override;
  bool take_hooked_locked() override;
  // Checks from time to time whether work still runs in the context.
  void look_at_device() override;

 private:
  // Making calls, in make_calls.cpp.
  struct MadeCall {
    RouteUse use;
    epd_ticket_t ticket = 0;
    abi::Call call;
    stream_kernels::Copies copies;
    abi::RowPlaces places;
    std::uint64_t limit_ns = 0;  // how long a kernel waits for its end
    Status bell_set;             // of a call of the host that is in the ring
  };
  Status check_stream(const SubmitRequest& request, bool& captured) const;
  Status prepare_call(Lock& lock, Group& group, const SubmitRequest& request, bool captured, MadeCall& made);
  Status admit_host_call(Lock& lock, Group& group, const SubmitRequest& request);
  // Takes a free record for a handle that is to be kept.
  static Status choose_route(Group& group, const SubmitRequest& request, RouteUse& use);
  Status enqueue(Group& group, const SubmitRequest& request, MadeCall& made);
  Status await_and_copy(Group& group, void* stream, abi::Op op, std::uint32_t slot, std::uint64_t limit_ns,
                        const stream_kernels::Copies& copies);
  Status write_epoch(Group& group, std::uint64_t epoch);

  // By the host, if there is no stream. The slot's last call has ended. With submit_mutex.
  void copy_by_host(Group& group, std::uint32_t slot, const MadeCall& made);
  void copy_outputs(Group& group, std::uint32_t slot);

  // How calls end.
  Status usable_locked(const Group& group);
  Status unknown_locked(epd_ticket_t ticket) const;
  bool ended_locked(const Group& group, KnownCall& call, CallOutcome& out) const;
  bool missed_locked(const Group& group, KnownCall& call, CallOutcome& out) const;
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
  const std::unique_ptr<CallMedium> medium_;

  // Guarded by the mutex.
  std::vector<Group*> groups_;
  std::vector<std::pair<Group*, epd_ticket_t>> hooked_;  // calls that have hooks
  Status device_status_;                                 // not OK: nothing runs in the context
  SteadyClock::time_point last_device_look_{};
};

}  // namespace epd::client
