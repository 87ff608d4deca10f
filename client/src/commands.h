// What the library knows of a membership whose operations are commands (proto/commands.h): the programs that
// they name. See README, "Commands".
#pragma once

#include "epd/epd.h"
#include "proto/arena.h"
#include "proto/session.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace epd::client {

// An operation but for what each command says anew.
struct Program {
  abi::Op op = abi::Op::kNone;
  std::uint32_t slot = 0;
  std::uint32_t flags = 0;  // abi::OpFlags
  std::uint32_t timeout_ms = 0;
  std::uint32_t sms = 0;
  std::uint32_t route = 0;
  bool operator==(const Program&) const = default;
};

struct Commands {
  struct Entry {
    Program program;
    bool recorded = false;  // with the engine, in this epoch
  };
  bool by_stream = false;  // set by join, before anyone else sees the group; all below: the session's mutex
  std::vector<Entry> programs;
  std::uint64_t epoch = 0;   // that the words hold; the group's, unless a resume failed midway
  std::uint32_t failed = 0;  // what the words held when the epoch was written
  bool rung = false;         // any has been enqueued

  // The number of a program; of one that is new: the next, with room made for it. None: all are in use.
  std::optional<std::uint32_t> number_of(const Program& program);
};

// What the ticket of a command says: the place whose last operation a stream may wait for.
struct CommandTicket {
  std::uint32_t slot = 0;
  std::uint32_t program = 0;

  static constexpr epd_ticket_t kMark = std::uint64_t{1} << 63;  // no other ticket gets there
  static constexpr bool is(epd_ticket_t ticket) { return (ticket & kMark) != 0; }
  constexpr epd_ticket_t pack() const { return kMark | std::uint64_t{program} << 8 | slot; }
  static constexpr CommandTicket unpack(epd_ticket_t ticket) {
    return {static_cast<std::uint32_t>(ticket & 0xff), static_cast<std::uint32_t>(ticket >> 8 & 0xff)};
  }
};

// Where the words lie that the library itself writes and reads.
struct CommandPlaces {
  std::uintptr_t words;

  constexpr std::uintptr_t epoch() const { return words + offsetof(abi::CommandWords, epoch); }
  constexpr std::uintptr_t closed() const { return words + offsetof(abi::CommandWords, closed); }
  // Then failed.
  constexpr std::uintptr_t done() const { return words + offsetof(abi::CommandWords, done); }
  constexpr std::uintptr_t flag(std::uint32_t program) const {
    return words + offsetof(abi::CommandWords, flags) + sizeof(std::uint32_t) * program;
  }
};

}  // namespace epd::client
