// What a resident kernel is given, and what its CTAs tell each other. Plain data.
#pragma once

#include "kernels/call_state.h"
#include "kernels/host_device.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels::cuda {

// What all CTAs of a resident kernel do next.
enum class Task : std::uint32_t { kStop, kDispatch, kCombine, kCombinePerExpert };

// A call that has become an operation. All of it is told from CTA to CTA, in words of 32 bits.
struct alignas(8) TakenCall {
  std::uint64_t tag;          // abi::op_tag: its epoch and number
  std::uint64_t routing_tag;  // of the routing that it uses; 0: it makes one
  std::uint32_t number;       // of the call
  std::uint32_t turn;         // since which the group's view is what it is
  std::uint32_t journal;      // entry where it is to tell how it ends
  std::uint32_t result;       // abi::result_of(), and with which number that is written
  std::uint32_t writing;
  std::uint32_t num_tokens;
  std::uint32_t timeout_ms;
  std::uint16_t flags;  // abi::OpFlags
  std::uint16_t sms;    // at most; 0: all
  std::uint16_t route;  // routing record
  std::uint8_t op_code;
  std::uint8_t slot;
  std::uint8_t block;  // of the exchange arenas
  std::uint8_t half;   // of the routing record
  std::uint8_t flagged;
  std::uint8_t ring;  // CallRing

  EPD_HOST_DEVICE constexpr abi::Op op() const { return static_cast<abi::Op>(op_code); }

  static constexpr std::uint32_t kWords = 14;
};
static_assert(sizeof(TakenCall) == TakenCall::kWords * 4);

// What CTA 0 tells the others to do. Each word has (heralds before + 1) in its upper half, so a word tells by
// itself whether it is there.
struct alignas(128) Herald {
  std::uint64_t task;
  std::uint64_t call[TakenCall::kWords];  // not of kStop
  static constexpr std::uint32_t kWords = 1 + TakenCall::kWords;
};
static_assert(sizeof(Herald) == 128);

// Device memory, zeroed once.
struct alignas(128) ResidentState {
  Herald herald;                   // as CTA 0 has found it
  alignas(64) std::uint64_t left;  // heralds that all CTAs have left (low half); bit 32: the last one failed
  std::uint32_t leaving;           // CTAs that have left a kStop
};

// A resident kernel never looks again and again at the host's memory: while it did, steps of the clients'
// streams on that GPU took some 30 us longer (measured; see daemon/device/README).
//
// It leaves between two calls when it is told to (CommandState::stop), and also when `round` is not what it
// was: a device may come to begin nothing new as long as a kernel stays on it (README, "Stepping aside").
struct ResidentArguments {
  ResidentState* state = nullptr;
  const std::uint32_t* round = nullptr;  // of the host
  std::uint32_t own_round = 0;           // as it was launched
  std::uint32_t number = 0;              // of the lane's kernels. Not 0
  CommandArguments commands = {};
};

}  // namespace epd::kernels::cuda
