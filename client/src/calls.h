// What the library knows of a membership whose operations are calls (proto/call_words.h). See README,
// "Calls".
#pragma once

#include "deadline.h"
#include "device.h"
#include "epd/epd.h"
#include "hooks.h"
#include "proto/arena.h"
#include "proto/results.h"
#include "proto/session.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

namespace epd::client {

// What the ticket of a call says.
struct CallTicket {
  abi::Op op = abi::Op::kNone;
  std::uint32_t slot = 0;
  bool by_host = false;
  std::uint32_t result = 0;  // abi::result_of()
  std::uint32_t serial = 0;  // 28 bits: of the calls of this process

  static constexpr epd_ticket_t kMark = std::uint64_t{1} << 63;  // no other ticket gets there
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
  // Of a graph, whose replays all end in one place.
  constexpr bool captured() const { return abi::place_of(result) >= abi::kOnceResults; }
};

// A call whose result is awaited, or may be.
struct KnownCall {
  epd_ticket_t ticket = 0;  // 0: none, or retired
  std::uint64_t epoch = 0;  // in which it was made; of a captured one: last asked for
  std::uint32_t result = 0;
  std::uint32_t kept_route = 0;  // that it reads or writes, retired or not; 0: none, for it is a slot's
  bool deferred = false;
  std::uint32_t runs_taken = 0;            // of a captured one: those that a wait has returned
  SteadyClock::time_point answer_by{};     // of the host's: an engine that runs has ended it by then
  SteadyClock::time_point missed_since{};  // since when it is known that it was not carried out; 0: it is not
  std::list<HookCall> waiting_hook;        // at most one
};

// All but open() and by_calls(): the session's mutex.
class Calls {
 public:
  // By join, before anyone else sees the group.
  void open(DeviceMemory results, const abi::GroupShape& shape);
  bool by_calls() const { return results_.address() != 0; }

  // Takes the next place for a result. The one that had it before is forgotten. 0: all have hooks, or use
  // kept routing records and have not ended.
  epd_ticket_t begin(abi::Op op, std::uint32_t slot, bool by_host, bool captured);
  // Null: never begun, retired, or its place has another's result.
  KnownCall* find(epd_ticket_t ticket);
  // Of a call whose result has been taken, or is not wanted.
  void forget(epd_ticket_t ticket);
  // Of a call that was not enqueued after all.
  void cancel(epd_ticket_t ticket);
  // Whether a call that has not ended uses the kept record. Of captured ones nobody knows.
  bool uses(std::uint32_t route) const;

  // How it has ended, if it has; of a captured one: another time than was taken.
  bool ended(const KnownCall& call, abi::CallEnd& end) const;
  bool sent(epd_ticket_t ticket) const;
  // What the dispatch has counted. The arrays stay until another dispatch of the slot is asked for its own.
  bool counted(epd_ticket_t ticket) const;
  void read_counts(std::uint32_t slot, epd_counts_t& counts);

  // Calls of the host.
  std::uint32_t host_ended() const;
  bool has_host_room() const { return host_tail - host_ended() < abi::kCallSlots; }
  // The ticket of one on the slot that has not ended; 0: there is none.
  epd_ticket_t host_call_on(std::uint32_t slot);
  void note_host_call(epd_ticket_t ticket);  // whose number was host_tail
  void note_host_end(epd_ticket_t ticket);   // its result has been seen
  void begin_epoch(std::uint64_t next, std::uint32_t failed_before);

  void note_timeout(std::uint32_t timeout_ms) {
    longest_timeout_ms = std::max(longest_timeout_ms, timeout_ms);
  }

  std::uint32_t longest_timeout_ms = 0;  // of any call so far
  std::uint64_t epoch = 0;               // that the words hold; the group's, unless a resume failed midway
  std::uint32_t failed = 0;              // what the words held when the epoch was written
  bool in_streams = false;               // a stream has enqueued any
  std::uint32_t host_tail = 0;           // calls of the host

 private:
  bool read_end(std::uint32_t result, abi::CallEnd& end) const;
  // It uses a kept record, and has neither ended nor been discarded by a resume since.
  bool holds_route(const KnownCall& call) const;
  const abi::Results& results() const { return *reinterpret_cast<const abi::Results*>(results_.address()); }
  const std::uint64_t* counts_of(std::uint32_t slot) const;

  DeviceMemory results_;
  abi::GroupShape shape_{};
  std::uint32_t once_ = 0;        // results handed out
  std::uint32_t replayed_ = 0;    // likewise
  std::vector<KnownCall> known_;  // by place; of replayed ones as many as there have been
  std::array<std::vector<std::int32_t>, abi::kMaxDepth> counts_;
  struct HostCall {
    epd_ticket_t ticket = 0;
    std::uint32_t number = 0;
  };
  std::vector<HostCall> host_calls_;  // of this epoch, not seen to have ended
};

// Where the words lie that the library itself writes and reads.
struct CallPlaces {
  std::uintptr_t words;

  constexpr std::uintptr_t epoch() const { return words + offsetof(abi::CallWords, epoch); }
  constexpr std::uintptr_t closed() const { return words + offsetof(abi::CallWords, closed); }
  // Then failed.
  constexpr std::uintptr_t done() const { return words + offsetof(abi::CallWords, done); }
  constexpr std::uintptr_t flag(std::uint32_t number) const {
    return words + offsetof(abi::CallWords, flags) + sizeof(std::uint32_t) * number;
  }
  constexpr std::uintptr_t host_call(std::uint32_t number) const {
    return words + offsetof(abi::CallWords, host_calls) +
           sizeof(abi::PackedCall) * (number % abi::kCallSlots);
  }
};

}  // namespace epd::client
