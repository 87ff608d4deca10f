// Operations that were submitted to an engine, by ticket, and the ring of their completions. With the
// session's mutex, except has().
#pragma once

#include "group.h"
#include "hooks.h"
#include "proto/session.h"
#include "stream_port.h"

#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

namespace epd::client {

struct Operation {
  Group* group = nullptr;
  abi::Op op = abi::Op::kNone;
  std::uint32_t slot = 0;
  bool deferred = false;  // submitted with defer_receive
  bool in_stream = false;
  bool staged = false;       // it has memory of the caller's
  bool has_outputs = false;  // in the caller's memory, on a host device: Group::outputs
  bool crowded = false;      // it has ended well, but brought more rows than `room`
  std::uint32_t room = 0;    // rows of a dispatch for which the caller's memory has room; 0: it gets none
  std::unique_ptr<stream_kernels::Copies> copies;  // in a stream: outputs that are still to be copied
  SteadyClock::time_point answer_by;               // a running engine has ended it by then
  bool done = false;
  epd_result_t result{};             // set when done
  std::string text;                  // why it failed; may be empty
  std::list<HookCall> waiting_hook;  // at most one; allocated when it is set, so completing can't fail
};

class Completions {
 public:
  Completions(abi::SegmentA& a, abi::SegmentB& b, Hooks& hooks, StreamPort& streams)
      : a_(a), b_(b), hooks_(hooks), streams_(streams) {}

  bool has() const;
  // Stores each completion in the ring with its operation. True if there was any.
  bool take();

  // Null: never submitted, or retired.
  Operation* find(epd_ticket_t ticket);
  // Called before it is published, because its completion may come at once.
  Operation& add(epd_ticket_t ticket);
  // For one that was not published after all.
  void withdraw(epd_ticket_t ticket);
  // For one that has ended.
  void retire(epd_ticket_t ticket) { operations_.erase(ticket); }
  // The operation may have ended or not. Retires the ticket.
  void add_hook(epd_ticket_t ticket, std::list<HookCall>& call);
  // Ends the operations in flight: all, or those of one group.
  void abort(StatusCode code, const char* text, const Group* only) noexcept;
  void forget(const Group& group);
  bool overdue(const Group& group) const;  // see Operations
  std::size_t num_in_flight() const { return num_in_flight_; }

 private:
  using Operations = std::unordered_map<epd_ticket_t, Operation>;
  void finish(Operations::iterator found, const abi::Completion& completion, const char* text) noexcept;

  abi::SegmentA& a_;
  abi::SegmentB& b_;
  Hooks& hooks_;
  StreamPort& streams_;
  std::atomic<std::uint64_t> head_{0};  // written with the mutex, read by the leader without it
  Operations operations_;
  std::size_t num_in_flight_ = 0;  // of operations_: not done
};

}  // namespace epd::client
