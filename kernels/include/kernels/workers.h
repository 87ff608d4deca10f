// The parameters of the gate and the main kernel, and what they exchange. Plain data.
//
// The engine enqueues pairs of kernels in a lane's stream, long before they are needed. Each pair stands
// after a wait for the lane's bell (abi::CallWords::bell). The gate, one warp, takes the next call and
// decides what the main kernel does. The main kernel carries the call out. One pair of a lane runs at a time.
#pragma once

#include "kernels/call_state.h"
#include "kernels/host_device.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels {

// The work of a main kernel.
enum class Task : std::uint32_t { kNone, kDispatch, kCombine, kCombinePerExpert };

// A call that has become an operation.
struct alignas(8) TakenCall {
  std::uint64_t tag;            // see abi::op_tag
  std::uint64_t routing_tag;    // tag of the routing that it uses; 0: it makes one
  std::uint32_t number;         // number of the call
  std::uint32_t enabled_epoch;  // enabled epoch, which the group view belongs to
  std::uint32_t journal;        // number of the journal entry for its end
  std::uint32_t result;         // abi::result_of(); `writing` is the number of its writing
  std::uint32_t writing;
  std::uint32_t num_tokens;
  std::uint32_t timeout_ms;
  std::uint16_t flags;  // see abi::OpFlags
  std::uint16_t sms;    // the most SMs it may use; 0: all
  std::uint16_t route;  // number of the routing record
  std::uint8_t op_code;
  std::uint8_t slot;
  std::uint8_t block;  // block of the exchange arenas
  std::uint8_t half;   // half of the routing record
  std::uint8_t flagged;
  std::uint8_t ring;  // see CallRing

  EPD_HOST_DEVICE constexpr abi::Op op() const { return static_cast<abi::Op>(op_code); }
};
static_assert(sizeof(TakenCall) == 56);

// A gate hands this to all CTAs of its main kernel. A main kernel that lingers does so itself for the calls
// after the first.
struct alignas(8) Work {
  Task task;                // kNone: all CTAs leave
  std::uint16_t ctas;       // CTAs that carry the call out
  std::uint16_t lingering;  // CTAs that linger for the next call, at least `ctas` of them; 0: none
  std::uint32_t number;     // of the work: the pair's, or of a later call of a main kernel that lingers
  std::uint32_t credit;     // SMs of SmCredits::held that the main kernel has taken
  std::uint64_t linger_until_ns;
  TakenCall call;

  static constexpr std::uint32_t kWords = 20;
};
static_assert(sizeof(Work) == Work::kWords * 4);
// The same on its way. The upper half of each word is the work's number, so each word shows whether it is
// there.
struct alignas(128) WorkWords {
  std::uint64_t words[Work::kWords];
};

// A gate leaves this for the end of the call.
struct alignas(32) WorkEnd {
  abi::PackedCall packed;          // the call as the client has written it
  std::uint64_t index_base;        // CallState::index_base
  std::uint32_t next[kCallRings];  // number of each ring's next call
  std::uint32_t reserved[4];
};
static_assert(sizeof(WorkEnd) == 64);

enum DoorBits : std::uint32_t {
  kInside = 1,      // a gate, or the main kernel after it, may run an operation
  kHandedOver = 2,  // the gate has handed an operation over, and has ended
  kBegun = 4,       // the main kernel has begun the operation
};
// Whether nothing runs behind such a door. A main kernel that has yet to begin finds that its epoch has
// ended.
EPD_HOST_DEVICE constexpr bool nothing_runs(std::uint32_t door) {
  return door == 0 || (door & (kHandedOver | kBegun)) == kHandedOver;
}

// The state of a lane between its kernels. Device memory, zeroed once.
struct alignas(128) LaneState {
  // The door. [0]: DoorBits; 0: nobody is inside. [1]: the enabled epoch, written by the host. Odd: calls are
  // run, from CallStart on. Even: calls are discarded. A gate sets the first and reads the second at once,
  // and so does a main kernel before it runs an operation. So when the host has stored an even epoch, and
  // then finds that nothing_runs(), nothing runs any more.
  alignas(8) std::uint32_t door[2];
  WorkWords work;
  alignas(64) WorkEnd end;
  // Index of the work division of the last dispatch and of the last combine (CallArguments::division). A main
  // kernel loads both before it knows its call.
  std::uint32_t divisions[2];
};

// SMs of a device that its lanes share. Each lane may always use its guaranteed SMs
// (CallState::guaranteed_sms). The SMs that a call uses beyond those are counted here, and never exceed
// `limit`. So every call that has begun has its SMs, and none waits for the SMs of another. Device memory.
struct SmCredits {
  std::uint32_t held;   // by gates and main kernels
  std::uint32_t limit;  // by the host
};

// The bells of the other ranks of the group, by rank; null: the rank is inactive. Device memory. The host
// writes it while nobody is inside.
struct Bells {
  std::uint32_t* of[kMaxRanks];
};

// The most calls that one pair carries out. One, unless the main kernel lingers for further calls.
inline constexpr std::uint32_t kWorksOfPair = 4096;
// How long a main kernel may linger altogether. A process that makes its context on the GPU may have to wait
// for it.
inline constexpr std::uint64_t kLingerNs = 50'000'000;

// The parameters of both kernels of a pair.
struct WorkerArguments {
  LaneState* lane = nullptr;
  SmCredits* credits = nullptr;
  const Bells* bells = nullptr;
  // The engine's generation, in the rank's exchange arena. A gate that finds another one belongs to an engine
  // that is dead. It rings again and leaves.
  const std::uint32_t* generation = nullptr;
  std::uint32_t own_generation = 0;
  std::uint32_t ctas = 0;  // of this pair's main kernel
  // The gate takes so many of SmCredits before it knows the call; not more than it may need beyond guaranteed
  // SMs.
  std::uint32_t asked_sms = 0;
  std::uint32_t number = 0;  // number of the pair's first work; the next pair's is kWorksOfPair higher
  CallArguments calls = {};
};

}  // namespace epd::kernels
