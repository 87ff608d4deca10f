// The steps of one thread of libepd's kernels: a stream makes a call, and waits for its end.
//
// Memory ordering. Earlier work of the stream has run when the kernel begins, and later work begins when it
// has ended. A fence of the device stands before a call's words, because only a kernel of this device reads
// them. `done` is loaded with acquire, at system scope: what peers on other GPUs have sent is there then.
// Only kernels of this process write the ring, in any stream, so an atomic of the device numbers the calls.
// Another fence of the device stands between the words and the bell: the kernel that the bell lets begin
// finds the words. This code is for device and host, see proto/ordered.h.
#pragma once

#include "proto/call_words.h"
#include "proto/ordered.h"
#include "step.h"

#include <cstdint>

namespace epd::stream_kernels {

using namespace ordered;
using abi::CallWords;

// Looks without a pause, some 100 us, before it sleeps between looks.
inline constexpr std::uint32_t kLooks = 256;
inline constexpr std::uint32_t kSleep_ns = 500;

// For each look at `done` it also looks at `closed`, which becomes 1 at most once.
inline constexpr std::uint32_t kLooksPerClosed = 16;

EPD_DEVICE inline bool ended(const CallWords& words, std::uint32_t end) {
  return abi::has_ended(load_acquire_system(&words.done), end);
}

EPD_DEVICE inline void await_end(const CallWords& words, std::uint32_t end, std::uint64_t limit_ns) {
  EPD_NO_UNROLL
  for (std::uint32_t i = 0; i < kLooks; ++i) {
    if (ended(words, end)) return;
  }
  const std::uint64_t begin = nanoseconds();
  EPD_NO_UNROLL
  for (std::uint32_t i = 0; !ended(words, end) && nanoseconds() - begin < limit_ns; ++i) {
    if (i % kLooksPerClosed == 0 && load_relaxed_system(&words.closed) != 0) return;
    look_after(i, kSleep_ns);
  }
}

// Enqueues the step's call, and returns its number. It loads all words that it needs together, because one
// load takes as long as all. Closing stores `closed`, then the flags. This kernel clears its flag, then reads
// `closed`. With a fence between on both sides, at least one sees the other, and the flag stays 1.
//
// The fence also orders what the stream did before ahead of the call's words. It is the first access of all,
// because a fence waits for the accesses before it. The fence before the bell waits for the call's words
// (0.28 us, H200, 2026-11-29). Nobody looks at a closed ring, so its bell is not set.
EPD_DEVICE inline std::uint32_t enqueue(const Step& step) {
  CallWords& words = *step.words;
  const abi::Call call = abi::unpack(abi::pack(step.call, 0));
  std::uint32_t& flag = words.flags[abi::flag_of(call.op, call.slot)];
  if (call.flagged) {
    store_relaxed_system(&flag, 0);
    fence_sequential_system();
  } else {
    fence_device();
  }
  abi::CallHalves halves = step.call;
  const std::uint32_t closed = load_relaxed_system(&words.closed);
  const std::uint32_t epoch = load_relaxed_system(&words.epoch);
  if (step.call_tokens_at != nullptr)
    halves.words[0] |= abi::packed_tokens(load_relaxed_system(step.call_tokens_at));
  const std::uint32_t number = add(&words.tail, 1);
  store_relaxed_system(&words.enqueued[call.slot], number + 1);
  if (closed != 0) {
    store_relaxed_system(&flag, 1);
    return number;
  }
  if ((call.flags & abi::kFlagPlaces) != 0) {
    abi::RowPlaces& places = words.places[number % abi::kCallSlots];
    store_relaxed_system(&places.in, step.places.in);
    store_relaxed_system(&places.out, step.places.out);
    fence_device();
  }
  halves.words[0] |= abi::packed_epoch(epoch);
  const abi::PackedCall packed = abi::pack(halves, number);
  std::uint64_t* const to = words.calls[number % abi::kCallSlots].words;
  for (std::uint32_t i = 0; i < abi::PackedCall::kWords; ++i) store_relaxed_system(to + i, packed.words[i]);
  fence_device();
  set_bits_system(&words.bell[0], 1);
  return number;
}

// ---- steps

// Returns the number of the call + 1, if it makes one.
EPD_DEVICE inline std::uint32_t begin(const Step& step) {
  return step.calls ? enqueue(step) + 1 : 0;
}

// `end`: of the call that the step has made.
EPD_DEVICE inline void await(const Step& step, std::uint32_t end) {
  // The last call on the slot that is earlier in the stream.
  if (step.wait == Wait::kLastCall) end = load_relaxed_system(&step.words->enqueued[step.slot]);
  if (step.wait != Wait::kNothing) await_end(*step.words, end, step.limit_ns);
}

// One that copies nothing, by one thread.
EPD_DEVICE inline void run(const Step& step) {
  await(step, begin(step));
}

}  // namespace epd::stream_kernels
