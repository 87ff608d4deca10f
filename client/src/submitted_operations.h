// Operations on host devices. They are submitted to an engine and completed by it, through two rings in
// shared memory.
#pragma once

#include "completions.h"
#include "operations.h"
#include "submission_ring.h"

namespace epd::client {

class SubmittedOperations final : public Operations {
 public:
  SubmittedOperations(abi::SegmentA& a, abi::SegmentB& b, const UniqueFd& engine_bell,
                      const abi::Welcome& welcome, Waits& waits, Connection& connection, Hooks& hooks);

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

  std::size_t num_descriptors() const override { return 2; }
  Status open(Group& /*group*/, const Packet& /*joined*/) override { return {}; }
  void begin_epoch_locked(Group& group) override { group.forget_routes_from(group.next_index); }
  Status renew(Group& /*group*/) override { return {}; }
  bool overdue_locked(Group& group) override;
  void abort_locked(StatusCode code, const char* text, const Group* only) noexcept override {
    completions_.abort(code, text, only);
  }
  void forget_locked(const Group& group) override { completions_.forget(group); }
  void unblock(const Group& /*group*/) override {}  // there are no streams

  bool has_news() const override { return completions_.has(); }
  bool take_news_locked() override;
  bool take_hooked_locked() override { return false; }
  void look_at_device() override {}

  // The next ticket is `last` + 1. Before the first submission.
  void start_after(epd_ticket_t ticket) { last_ticket_ = ticket; }

 private:
  // In submit.cpp.
  Status check_stream(const StreamUse& stream) const;
  Status ready_to_submit(Lock& lock, Group& group, const SubmitRequest& request);
  Status choose_route(Lock& lock, Group& group, const SubmitRequest& request, RouteUse& use);
  // Copies what the caller's memory gets of the last operation on the slot, if that has ended well. With
  // submit_mutex.
  void copy_outputs(Group& group, std::uint32_t slot);
  void copy_by_host(Lock& lock, Group& group, std::uint32_t slot, const stream_kernels::Copies& copies);
  // Everything that can refuse a submission.
  Status admit(Lock& lock, Group& group, const SubmitRequest& request, RouteUse& use);
  Status push(Lock& lock, Group& group, const SubmitRequest& request, const RouteUse& use,
              epd_ticket_t ticket);
  Status no_room(Lock& lock);
  // Notes what the caller's memory gets when the operation has ended. Called after push().
  void note_copies(Group& group, const SubmitRequest& request, const stream_kernels::Copies& copies,
                   epd_ticket_t ticket);

  const abi::Welcome& welcome_;
  Waits& waits_;
  Connection& connection_;
  Hooks& hooks_;

  // Guarded by the mutex.
  SubmissionRing ring_;
  Completions completions_;
  epd_ticket_t last_ticket_ = 0;
};

}  // namespace epd::client
