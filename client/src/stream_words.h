// How a stream tells the engine that an operation may begin and waits for its end without stream memory
// operations: kernels of one thread. The words are StreamWords of a slot (proto/arena.h).
//
// Memory ordering. What came before in the stream has run when the kernel begins; the store that marks ready
// is a release and the load that sees done an acquire, both for the whole system, because the engine is
// another process, and its peers are other GPUs. What comes after in the stream begins when the kernel has
// ended.
//
// Calls go by a ring instead (abi::CallWords): a call's first word is stored as `ready` is, but released
// at the device's scope, as only a kernel of this device takes it; `done` is looked at likewise. Only kernels
// of this process write the ring, in whatever streams, so an atomic of the device numbers the calls.
// For device and host, see proto/ordered.h.
#pragma once

#include "enqueued.h"
#include "proto/call_words.h"
#include "proto/ordered.h"

#include <cstdint>

namespace epd::stream_kernels {

using namespace ordered;
using abi::CallWords;
using abi::kMostCommandTokens;

// Looks in a row before it begins to sleep between them: some 100 us.
inline constexpr std::uint32_t kLooks = 256;
inline constexpr std::uint32_t kSleep_ns = 500;

// Cyclic, as cuStreamWaitValue32 compares.
EPD_DEVICE inline bool reached(const std::uint32_t* word, std::uint32_t value) {
  return static_cast<std::int32_t>(load_acquire_system(word) - value) >= 0;
}

EPD_DEVICE inline void await(const std::uint32_t* word, std::uint32_t value, std::uint64_t limit_ns) {
  for (std::uint32_t i = 0; i < kLooks; ++i) {
    if (reached(word, value)) return;
  }
  const std::uint64_t begin = nanoseconds();
  for (std::uint32_t i = 0; !reached(word, value) && nanoseconds() - begin < limit_ns; ++i)
    look_after(i, kSleep_ns);
}

// ---- calls

// Looks at `done` for each at `closed`, which is not 0 once, if ever.
inline constexpr std::uint32_t kLooksPerClosed = 16;

EPD_DEVICE inline bool ended(const CallWords& words, std::uint32_t end) {
  return abi::has_ended(load_acquire_system(&words.done), end);
}

EPD_DEVICE inline void await_end(const CallWords& words, std::uint32_t end, std::uint64_t limit_ns) {
  for (std::uint32_t i = 0; i < kLooks; ++i) {
    if (ended(words, end)) return;
  }
  const std::uint64_t begin = nanoseconds();
  for (std::uint32_t i = 0; !ended(words, end) && nanoseconds() - begin < limit_ns; ++i) {
    if (i % kLooksPerClosed == 0 && load_relaxed_system(&words.closed) != 0) return;
    look_after(i, kSleep_ns);
  }
}

// Enqueues a call. What it needs to know is loaded together, for each load takes as long as all of them.
// Whoever closes stores `closed` and then the flags; this clears its flag and then looks at `closed`. With
// the fence between, and one on the other side, one of the two sees the other: the flag stays 1.
EPD_DEVICE inline void enqueue(CallWords& words, const Enqueued& its) {
  abi::Call call = its.call;
  std::uint32_t& flag = words.flags[abi::flag_of(call.op, call.slot)];
  if (call.flagged) {
    store_relaxed_system(&flag, 0);
    fence_sequential_system();
  }
  const std::uint32_t closed = load_relaxed_system(&words.closed);
  call.epoch = load_relaxed_system(&words.epoch);
  if (its.num_tokens_at != nullptr) call.num_tokens = load_relaxed_system(its.num_tokens_at);
  call.number = add(&words.tail, 1);
  store_relaxed_system(&words.enqueued[call.slot], call.number + 1);
  if (closed != 0) {
    store_relaxed_system(&flag, 1);
    return;
  }
  if (call.num_tokens > kMostCommandTokens) call.num_tokens = kMostCommandTokens;
  const abi::PackedCall packed = abi::pack(call);
  std::uint64_t* const to = words.calls[call.number % abi::kCallSlots].words;
  for (std::uint32_t i = 1; i < abi::PackedCall::kWords; ++i) store_relaxed_system(to + i, packed.words[i]);
  // The kernel that acquires it is on this device.
  store_release(to, packed.words[0]);
  if (its.waits != 0) await_end(words, call.number + 1, its.limit_ns);
}

// For the end of the last call on the slot before this in the stream.
EPD_DEVICE inline void await_last(const CallWords& words, std::uint32_t slot, std::uint64_t limit_ns) {
  await_end(words, load_relaxed_system(&words.enqueued[slot]), limit_ns);
}

}  // namespace epd::stream_kernels
