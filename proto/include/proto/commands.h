// Commands: operations that a stream of the client's asks for by itself, with no host in the path. They lie
// in the rank's user arena, which the client and the kernel that stays on its device share. Plain data, also
// for device code. The README of this room tells the protocol ("Commands").
#pragma once

#include "proto/shape.h"

#include <cstdint>

namespace epd::abi {

inline constexpr std::uint32_t kCommandSlots = 64;
inline constexpr std::uint32_t kMaxPrograms = 64;  // operations recorded beforehand, which commands name
// What a command has room for: a larger number is rung as this, which is more than any group's max_tokens.
inline constexpr std::uint32_t kMostCommandTokens = 0x1ffff;

// Numbers of commands and counts of them are cyclic in 32 bits.
struct CommandWords {
  // By the client. Command i lies at i % kCommandSlots, see pack().
  alignas(64) std::uint64_t commands[kCommandSlots];
  alignas(64) std::uint32_t tail;             // commands rung
  std::uint32_t epoch;                        // of the group, in which the client acts
  alignas(64) std::uint32_t rung[kMaxDepth];  // by buffer slot: number + 1 of the last command there
  // Not 0: no engine will take a command any more, nothing waits for one. By whoever finds that out: the
  // engine when it lets the rank go, the library when the daemon is lost.
  alignas(64) std::uint32_t closed;
  // By the engine's kernel.
  alignas(64) std::uint32_t done;                 // commands that have ended, well or not. Stored last
  std::uint32_t failed;                           // of these, how many were not carried out
  alignas(64) std::uint32_t flags[kMaxPrograms];  // 1: that program's command with `flagged` has ended
};
static_assert(sizeof(CommandWords) == 1024);

struct Command {
  std::uint32_t number = 0;
  std::uint32_t num_tokens = 0;  // 17 bits; of a dispatch that makes a routing, others: 0
  std::uint32_t program = 0;     // 6 bits
  bool flagged = false;          // a stream memory operation waits for its flag
  std::uint32_t epoch = 0;       // low 8 bits
};

// A command is one word, stored at once with release at the device's scope: number + 1 above everything, so
// that the word alone tells whether command `number` is there.
constexpr std::uint64_t pack(const Command& c) {
  return std::uint64_t{c.number + 1} << 32 | std::uint64_t{c.num_tokens & kMostCommandTokens} << 15 |
         std::uint64_t{c.program & 0x3f} << 9 | std::uint64_t{c.flagged} << 8 | (c.epoch & 0xff);
}
constexpr Command unpack(std::uint64_t word) {
  return {static_cast<std::uint32_t>(word >> 32) - 1,
          static_cast<std::uint32_t>(word >> 15 & kMostCommandTokens),
          static_cast<std::uint32_t>(word >> 9 & 0x3f), (word >> 8 & 1) != 0,
          static_cast<std::uint32_t>(word & 0xff)};
}

// Whether the command that is the last of `end` has ended when `done` have. No more than kCommandSlots are
// rung and have not ended, so an `end` that is further ahead is behind: of a slot that was not used for 2^31
// commands or more.
constexpr bool has_ended(std::uint32_t done, std::uint32_t end) {
  const std::uint32_t ahead = end - done;
  return ahead == 0 || ahead > kCommandSlots;
}

}  // namespace epd::abi
