// What the library knows of a membership whose operations are calls (proto/commands.h). See README,
// "Commands".
#pragma once

#include "epd/epd.h"
#include "proto/arena.h"
#include "proto/session.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace epd::client {

struct Commands {
  bool by_stream = false;  // set by join, before anyone else sees the group; all below: the session's mutex
  std::uint32_t longest_timeout_ms = 0;  // of any call so far
  std::uint64_t epoch = 0;               // that the words hold; the group's, unless a resume failed midway
  std::uint32_t failed = 0;              // what the words held when the epoch was written
  bool rung = false;                     // any has been enqueued

  void note_timeout(std::uint32_t timeout_ms) {
    longest_timeout_ms = std::max(longest_timeout_ms, timeout_ms);
  }
};

// What the ticket of a call says: the place whose last operation a stream may wait for.
struct CommandTicket {
  std::uint32_t slot = 0;
  abi::Op op = abi::Op::kNone;

  static constexpr epd_ticket_t kMark = std::uint64_t{1} << 63;  // no other ticket gets there
  static constexpr bool is(epd_ticket_t ticket) { return (ticket & kMark) != 0; }
  constexpr epd_ticket_t pack() const { return kMark | static_cast<std::uint64_t>(op) << 8 | slot; }
  static constexpr CommandTicket unpack(epd_ticket_t ticket) {
    return {static_cast<std::uint32_t>(ticket & 0xff), static_cast<abi::Op>(ticket >> 8 & 0xff)};
  }
};

// Where the words lie that the library itself writes and reads.
struct CommandPlaces {
  std::uintptr_t words;

  constexpr std::uintptr_t epoch() const { return words + offsetof(abi::CommandWords, epoch); }
  constexpr std::uintptr_t closed() const { return words + offsetof(abi::CommandWords, closed); }
  // Then failed.
  constexpr std::uintptr_t done() const { return words + offsetof(abi::CommandWords, done); }
  constexpr std::uintptr_t flag(std::uint32_t number) const {
    return words + offsetof(abi::CommandWords, flags) + sizeof(std::uint32_t) * number;
  }
};

}  // namespace epd::client
