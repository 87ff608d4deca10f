// The library's state of the calls of a membership (proto/call_words.h). See README, "Calls".
#pragma once

#include "call_medium.h"
#include "deadline.h"
#include "device.h"
#include "epd/epd.h"
#include "hooks.h"
#include "proto/arena.h"
#include "proto/results.h"
#include "proto/session.h"
#include "step.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

namespace epd::client {

// The parts of a call's ticket.
struct CallTicket {
  abi::Op op = abi::Op::kNone;
  std::uint32_t slot = 0;
  bool by_host = false;
  std::uint32_t result = 0;  // abi::result_of()
  std::uint32_t serial = 0;  // 28 bits: the number of the call in this process

  static constexpr epd_ticket_t kMark = std::uint64_t{1} << 63;  // only in tickets of calls
  static constexpr bool is(epd_ticket_t ticket) { return (ticket & kMark) != 0; }
  constexpr epd_ticket_t pack() const {
    return kMark | static_cast<std::uint64_t>(op) << 53 | std::uint64_t{slot} << 49 |
           std::uint64_t{by_host} << 48 | std::uint64_t{result} << 28 | (serial & 0xfffffff);
  }
  static constexpr CallTicket unpack(epd_ticket_t ticket) {
    return {static_cast<abi::Op>(ticket >> 53 & 0xff), static_cast<std::uint32_t>(ticket >> 49 & 0xf),
            (ticket >> 48 & 1) != 0, static_cast<std::uint32_t>(ticket >> 28 & 0xfffff),
            static_cast<std::uint32_t>(ticket & 0xfffffff)};
  }
  // Captured in a graph. All its replays end in one place.
  constexpr bool captured() const { return abi::place_of(result) >= abi::kOnceResults; }
};

// A call whose result a caller may still ask for.
struct KnownCall {
  epd_ticket_t ticket = 0;  // 0: none, or retired
  std::uint64_t epoch = 0;  // in which it was made; captured: in which a caller last asked for it
  std::uint32_t result = 0;
  std::uint32_t kept_route = 0;  // the kept record that it uses, even if retired; 0: it uses a slot's
  bool deferred = false;
  bool staged = false;         // it has memory of the caller's
  bool holds_outputs = false;  // the host is still to copy them, even if it is retired
  std::uint32_t room = 0;      // rows of a dispatch for which the caller's memory has room; 0: it gets none
  std::unique_ptr<stream_kernels::Copies> copies;  // outputs that are still to be copied
  std::uint32_t runs_taken = 0;                    // captured: the replays for which a wait has returned
  SteadyClock::time_point answer_by{};     // of a call of the host: a running engine has ended it by then
  SteadyClock::time_point missed_since{};  // when it was first seen as not carried out; 0: never
  std::list<HookCall> waiting_hook;        // at most one
};

// Callers hold the session's mutex, except in open().
class Calls {
 public:
  // Called by join, before any other thread sees the group.
  void open(ResultsMemory results, const abi::GroupShape& shape);

  // Takes the next place for a result. The library forgets the call that had it before. Returns 0 if no place
  // is free: each belongs to a call with a hook, or to one that uses a kept record and has not ended.
  epd_ticket_t begin(abi::Op op, std::uint32_t slot, bool by_host, bool captured);
  // Null: never begun, retired, or its place has another result now.
  KnownCall* find(epd_ticket_t ticket);
  // Whether its result says that it was not carried out.
  bool ended_badly(epd_ticket_t ticket) const;
  // Whether it has ended well. Without the mutex. While KnownCall::holds_outputs its result stays.
  bool ended_well(epd_ticket_t ticket) const;
  void outputs_done(epd_ticket_t ticket);
  // For a call whose result has been taken or is not wanted.
  void forget(epd_ticket_t ticket);
  // For a call that was not enqueued after all.
  void cancel(epd_ticket_t ticket);
  // Whether a call that has not ended uses the kept record. The library does not know of captured calls.
  bool uses(std::uint32_t route) const;

  // True if it has ended; a captured one: if a replay has ended that no wait has returned for.
  bool ended(const KnownCall& call, abi::CallEnd& end) const;
  bool sent(epd_ticket_t ticket) const;
  // Whether the dispatch has counted, and its counts. The arrays stay until counts of another dispatch on the
  // slot are read.
  bool counted(epd_ticket_t ticket) const;
  void read_counts(std::uint32_t slot, epd_counts_t& counts);

  // Calls of streams for which no stream waits: with defer_receive, and later than the last wait of a stream.
  // The ring has room for so many that have not ended, as calls end in their order. Captured ones are not
  // known.
  bool has_stream_room();
  void note_stream_call(epd_ticket_t ticket) { unawaited_.push_back(ticket); }
  void note_stream_wait(epd_ticket_t ticket);  // its end is waited for

  // Calls of the host.
  std::uint32_t host_ended() const;
  bool has_host_room() const { return host_tail - host_ended() < abi::kCallSlots; }
  // The ticket of a call of the host on the slot that has not ended; 0: none.
  epd_ticket_t host_call_on(std::uint32_t slot);
  // The sum of the timeouts of those in flight, as host_call_on() saw them last.
  std::uint64_t host_timeouts_ms() const;
  // Its number is host_tail.
  void note_host_call(epd_ticket_t ticket, std::uint32_t timeout_ms, SteadyClock::time_point answer_by);
  // Whether one has not ended that a running engine has ended by then.
  bool host_calls_due(SteadyClock::time_point then);
  void note_host_end(epd_ticket_t ticket);  // its result has been seen
  void begin_epoch(std::uint64_t next, std::uint32_t failed_before);

  void note_timeout(std::uint32_t timeout_ms) {
    longest_timeout_ms = std::max(longest_timeout_ms, timeout_ms);
  }

  std::uint32_t longest_timeout_ms = 0;  // the longest of all calls so far
  std::uint64_t epoch = 0;               // the epoch in the words; the group's, unless a resume failed midway
  std::uint32_t failed = 0;              // `failed` in the words when the epoch was written
  bool in_streams = false;               // a stream has enqueued a call
  std::uint32_t host_tail = 0;           // the number of the next call of the host

 private:
  bool read_end(std::uint32_t result, abi::CallEnd& end) const;
  // It uses a kept record, has not ended, and no resume has discarded it.
  bool holds_route(const KnownCall& call) const;
  const abi::Results& results() const { return *reinterpret_cast<const abi::Results*>(results_.address()); }
  const std::uint64_t* counts_of(std::uint32_t slot) const;

  ResultsMemory results_;
  abi::GroupShape shape_{};
  std::uint32_t once_ = 0;        // places handed out to calls made once
  std::uint32_t replayed_ = 0;    // places handed out to captured calls
  std::vector<KnownCall> known_;  // by place; the part for captured calls grows
  std::array<std::vector<std::int32_t>, abi::kMaxDepth> counts_;
  struct HostCall {
    epd_ticket_t ticket = 0;
    std::uint32_t number = 0;
    std::uint32_t timeout_ms = 0;
    SteadyClock::time_point answer_by{};
  };
  void drop_ended_host_calls();
  std::vector<HostCall> host_calls_;     // of this epoch, not seen to have ended
  std::vector<epd_ticket_t> unawaited_;  // of this epoch
};

// The words that the library itself writes and reads.
struct CallPlaces {
  std::uintptr_t words;

  constexpr std::uintptr_t epoch() const { return words + offsetof(abi::CallWords, epoch); }
  constexpr std::uintptr_t closed() const { return words + offsetof(abi::CallWords, closed); }
  // `failed` follows it.
  constexpr std::uintptr_t done() const { return words + offsetof(abi::CallWords, done); }
  constexpr std::uintptr_t flag(std::uint32_t number) const {
    return words + offsetof(abi::CallWords, flags) + sizeof(std::uint32_t) * number;
  }
  constexpr std::uintptr_t host_call(std::uint32_t number) const {
    return words + offsetof(abi::CallWords, host_calls) +
           sizeof(abi::PackedCall) * (number % abi::kCallSlots);
  }
  constexpr std::uintptr_t host_bell() const { return words + offsetof(abi::CallWords, bell[1]); }
};

}  // namespace epd::client
