// The parameters of the resident kernel, and what its CTAs exchange. Plain data.
#pragma once

#include "kernels/call_state.h"
#include "kernels/host_device.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels::cuda {

// What all CTAs of a resident kernel do next.
enum class Task : std::uint32_t { kStop, kDispatch, kCombine, kCombinePerExpert };

// A call that has become an operation. CTA 0 broadcasts all of it, in words of 32 bits.
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

  static constexpr std::uint32_t kWords = 14;
};
static_assert(sizeof(TakenCall) == TakenCall::kWords * 4);

// The work broadcast: the line in which CTA 0 gives a call to the other CTAs. The upper half of each word is
// the number of the broadcast plus 1, so each word shows whether it is there.
struct alignas(128) WorkBroadcast {
  std::uint64_t task;
  std::uint64_t call[TakenCall::kWords];  // unused by kStop
  static constexpr std::uint32_t kWords = 1 + TakenCall::kWords;
};
static_assert(sizeof(WorkBroadcast) == 128);

// The state of a resident kernel. Device memory, zeroed once.
struct alignas(128) ResidentState {
  WorkBroadcast broadcast;  // written by CTA 0
  // Low half: broadcasts that all CTAs have left. Bit 32: the last one's operation failed.
  alignas(64) std::uint64_t left;
  std::uint32_t leaving;  // CTAs that have left at a kStop
};

// The parameters of a resident kernel. The kernel never polls host memory in a tight loop: while it did,
// steps of the clients' streams on the same GPU took some 30 us longer (daemon/device/README).
//
// It leaves between two calls when it is told to (CallState::stop). It also leaves when the yield epoch
// changes: a device may come to start nothing new while a persistent kernel occupies it
// (daemon/device/README, "How kernels yield").
struct ResidentArguments {
  ResidentState* state = nullptr;
  const std::uint32_t* yield_epoch = nullptr;  // yield epoch, in host memory
  std::uint32_t own_yield_epoch = 0;           // yield epoch when the kernel was launched
  std::uint32_t number = 0;                    // number of this kernel among the lane's kernels; not 0
  CallArguments calls = {};
};

}  // namespace epd::kernels::cuda
