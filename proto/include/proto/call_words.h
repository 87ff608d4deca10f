// Calls: operations that a client hands to the device, by its streams or by its host. On a GPU the engine's
// kernels take them, with no engine's CPU in the path; on a host device the engine's loop does. They lie in
// the rank's user arena, which both share. Plain data, also for device code. The README of this room tells
// the protocol ("Calls").
#pragma once

#include "proto/operation.h"
#include "proto/results.h"
#include "proto/row_place.h"
#include "proto/shape.h"

#include <cstdint>

namespace epd::abi {

inline constexpr std::uint32_t kCallSlots = 64;
// The most tokens that a call can state: a larger number is enqueued as this, which is more than any group's
// max_tokens.
inline constexpr std::uint32_t kMostCommandTokens = 0x1ffff;
// The same for SMs; 0xffff is more than any device has, and so all of them.
inline constexpr std::uint32_t kMaxCallSms = 0xffff;
inline constexpr std::uint32_t kCallRouteBits = 13;

// Flags for stream memory operations to wait for. Operations of one kind on one buffer slot share one: they
// come one after the other.
inline constexpr std::uint32_t kOpKinds = 4;
inline constexpr std::uint32_t kCallFlags = kMaxDepth * kOpKinds;
constexpr std::uint32_t flag_of(Op op, std::uint32_t slot) {
  return slot * kOpKinds + static_cast<std::uint32_t>(op);
}

// One operation.
struct Call {
  std::uint32_t number = 0;
  Op op = Op::kNone;             // 2 bits
  std::uint32_t slot = 0;        // 4 bits
  std::uint32_t num_tokens = 0;  // 17 bits; of a dispatch that makes a routing, others: 0
  bool flagged = false;          // a stream memory operation waits for its flag
  std::uint32_t epoch = 0;       // low 8 bits: in which the client acts
  std::uint32_t flags = 0;       // 16 bits, OpFlags
  std::uint32_t sms = 0;         // 16 bits: at most; 0 = the group's
  std::uint32_t route = 0;       // 13 bits
  std::uint32_t result = 0;      // 19 bits, result_of()
  std::uint32_t timeout_ms = 0;  // 0 = the daemon's default

  constexpr OpRequest request() const { return {op, slot, num_tokens, flags, route}; }
};

// A call as it lies in the ring: words that have its number + 1 in their upper half, each stored at once. So
// each tells whether it is of that call, and their order does not matter.
struct alignas(32) PackedCall {
  static constexpr std::uint32_t kWords = 4;
  std::uint64_t words[kWords];
};

// The lower halves of these words: all but the call's number.
struct CallHalves {
  std::uint32_t words[PackedCall::kWords] = {};
};
constexpr std::uint32_t packed_tokens(std::uint32_t num_tokens) {
  return (num_tokens < kMostCommandTokens ? num_tokens : kMostCommandTokens) << 15;
}
constexpr std::uint32_t packed_epoch(std::uint32_t epoch) {
  return (epoch & 0xff) << 7;
}
constexpr CallHalves halves_of(const Call& c) {
  return {{packed_tokens(c.num_tokens) | packed_epoch(c.epoch) | std::uint32_t{c.flagged} << 6 |
               static_cast<std::uint32_t>(c.op) << 4 | (c.slot & 0xf),
           c.flags << 16 | (c.sms & kMaxCallSms), c.result << kCallRouteBits | c.route, c.timeout_ms}};
}
constexpr PackedCall pack(const CallHalves& halves, std::uint32_t number) {
  const std::uint64_t upper = std::uint64_t{number + 1} << 32;
  return {
      {upper | halves.words[0], upper | halves.words[1], upper | halves.words[2], upper | halves.words[3]}};
}
constexpr PackedCall pack(const Call& c) {
  return pack(halves_of(c), c.number);
}
constexpr Call unpack(const PackedCall& packed) {
  const auto low = [&](std::uint32_t i) { return static_cast<std::uint32_t>(packed.words[i]); };
  Call call;
  call.number = static_cast<std::uint32_t>(packed.words[0] >> 32) - 1;
  call.num_tokens = low(0) >> 15;
  call.epoch = low(0) >> 7 & 0xff;
  call.flagged = (low(0) >> 6 & 1) != 0;
  call.op = static_cast<Op>(low(0) >> 4 & 3);
  call.slot = low(0) & 0xf;
  call.flags = low(1) >> 16;
  call.sms = low(1) & kMaxCallSms;
  call.route = low(2) & ((1u << kCallRouteBits) - 1);
  call.result = low(2) >> kCallRouteBits;
  call.timeout_ms = low(3);
  return call;
}
static_assert(kMaxDepth <= 16 && kMaxTokens < kMostCommandTokens &&
              kMaxDepth + kMaxHandles <= 1u << kCallRouteBits);

// Numbers of calls and counts of them are cyclic in 32 bits.
struct CallWords {
  // Written by the client. Call i lies at i % kCallSlots.
  alignas(64) PackedCall calls[kCallSlots];
  // Calls that the client's host makes, with numbers of their own.
  alignas(64) PackedCall host_calls[kCallSlots];
  // The bell. The device waits until one of the two words is not 0, and then looks at both rings. A word is
  // only ever set, to 1, after a call's words; the device clears both at once before it looks. [0]: set by
  // streams, by gates of other ranks, and by the engine. [1]: set by the client's host.
  alignas(64) std::uint32_t bell[2];
  alignas(64) std::uint32_t tail;                 // calls enqueued
  std::uint32_t epoch;                            // of the group, in which the client acts
  alignas(64) std::uint32_t enqueued[kMaxDepth];  // by buffer slot: number + 1 of the last call there
  // Not 0: no engine will take a call any more, nothing waits for one. Written by the engine when it lets the
  // rank go, or by the library when the daemon is lost.
  alignas(64) std::uint32_t closed;
  // Written by the device.
  alignas(64) std::uint32_t done;               // calls that have ended, well or not. Stored last
  std::uint32_t failed;                         // of these, how many were not carried out
  alignas(64) std::uint32_t flags[kCallFlags];  // 1: the call with `flagged` has ended, see flag_of
  // Written by the client, before the call: the places of calls in `calls` that have kFlagPlaces.
  alignas(64) RowPlaces places[kCallSlots];
};
static_assert(sizeof(CallWords) == 5696);

// Whether the call that is the last of `end` has ended when `done` have. No more than kCallSlots are
// enqueued and have not ended, so an `end` that is further ahead is behind: of a slot that was not used for
// 2^31 calls or more.
constexpr bool has_ended(std::uint32_t done, std::uint32_t end) {
  const std::uint32_t ahead = end - done;
  return ahead == 0 || ahead > kCallSlots;
}

}  // namespace epd::abi
