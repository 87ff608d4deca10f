// Operations that were submitted to an engine, by ticket, and the ring of their completions. With the
// session's mutex, except has().
#pragma once

#include "group.h"
#include "hooks.h"
#include "proto/session.h"

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
  bool deferred = false;     // submitted with defer_receive
  bool has_outputs = false;  // in the caller's memory: Group::outputs
  bool crowded = false;      // it has ended well, but brought more rows than `room`
  std::uint32_t room = 0;    // rows of a dispatch for which the caller's memory has room; 0: it gets none
  SteadyClock::time_point answer_by;  // a running engine has ended it by then
  bool done = false;
  epd_result_t result{};             // set when done
  std::string text;                  // why it failed; may be empty
  std::list<HookCall> waiting_hook;  // at most one; allocated when it is set, so completing can't fail
};

class Completions {
 public:
  Completions(abi::SegmentA& a, abi::SegmentB& b, Hooks& hooks) : a_(a), b_(b), hooks_(hooks) {}

  bool has() const;
  // Stores each completion in the ring with its operation. True if there was any.
  bool take();

  // Null: never submitted, or retired.
  Operation* find(epd_ticket_t ticket);
  // Called before it is published, because its completion may come at once.
  Operation& add(epd_ticket_t ticket) { return operations_[ticket]; }
  // For one that has ended, or was not published after all.
  void retire(epd_ticket_t ticket) { operations_.erase(ticket); }
  // The operation may have ended or not. Retires the ticket.
  void add_hook(epd_ticket_t ticket, std::list<HookCall>& call);
  // Ends the operations in flight: all, or those of one group.
  void abort(StatusCode code, const char* text, const Group* only) noexcept;
  void forget(const Group& group);
  bool overdue(const Group& group) const;  // see Operations

 private:
  using Operations = std::unordered_map<epd_ticket_t, Operation>;
  void finish(Operations::iterator found, const abi::Completion& completion, const char* text) noexcept;

  abi::SegmentA& a_;
  abi::SegmentB& b_;
  Hooks& hooks_;
  std::atomic<std::uint64_t> head_{0};  // written with the mutex, read by the leader without it
  Operations operations_;
};

}  // namespace epd::client
