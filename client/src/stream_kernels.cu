// How a stream tells the engine that an operation may begin and waits for its end without stream memory
// operations: kernels of one thread. The words are StreamWords of a slot (proto/arena.h).
//
// Memory ordering. What came before in the stream has run when the kernel begins; the store that marks ready
// is a release and the load that sees done an acquire, both for the whole system, because the engine is
// another process, and its peers are other GPUs. What comes after in the stream begins when the kernel has
// ended.
//
// Commands go by a ring instead (abi::CommandWords): the command's word is stored as `ready` is, but released
// at the device's scope, as only a kernel of this device takes it; `done` is looked at likewise. Only kernels
// of this process write the ring, in whatever streams, so an atomic of the device numbers the commands.
#include "proto/commands.h"

#include <cstdint>

namespace {

// Looks in a row before it begins to sleep between them: some 100 us.
constexpr std::uint32_t kLooks = 256;
constexpr std::uint32_t kSleep_ns = 500;

__device__ void mark(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Cyclic, as cuStreamWaitValue32 compares.
__device__ bool reached(const std::uint32_t* word, std::uint32_t value) {
  std::uint32_t now;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  return static_cast<std::int32_t>(now - value) >= 0;
}

__device__ std::uint64_t clock_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ void await(const std::uint32_t* word, std::uint32_t value, std::uint64_t limit_ns) {
  for (std::uint32_t i = 0; i < kLooks; ++i) {
    if (reached(word, value)) return;
  }
  const std::uint64_t begin = clock_ns();
  while (!reached(word, value) && clock_ns() - begin < limit_ns) __nanosleep(kSleep_ns);
}

// ---- commands

using epd::abi::CommandWords;
using epd::abi::kMostCommandTokens;

// Looks at `done` for each at `closed`, which is not 0 once, if ever.
constexpr std::uint32_t kLooksPerClosed = 16;

__device__ std::uint32_t load(const std::uint32_t* word) {
  std::uint32_t now;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  return now;
}

__device__ void store(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ bool ended(const CommandWords& words, std::uint32_t end) {
  std::uint32_t now;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(&words.done) : "memory");
  return epd::abi::has_ended(now, end);
}

__device__ void await_end(const CommandWords& words, std::uint32_t end, std::uint64_t limit_ns) {
  for (std::uint32_t i = 0; i < kLooks; ++i) {
    if (ended(words, end)) return;
  }
  const std::uint64_t begin = clock_ns();
  for (std::uint32_t i = 0; !ended(words, end) && clock_ns() - begin < limit_ns; ++i) {
    if (i % kLooksPerClosed == 0 && load(&words.closed) != 0) return;
    __nanosleep(kSleep_ns);
  }
}

}  // namespace

// Without a word they do nothing: that is how they are loaded, see stream_kernels.cpp.

extern "C" __global__ void __launch_bounds__(1) epd_signal(std::uint32_t* ready, std::uint32_t value) {
  if (ready != nullptr) mark(ready, value);
}

// Ends after limit_ns though the word has not come.
extern "C" __global__ void __launch_bounds__(1)
    epd_wait(const std::uint32_t* done, std::uint32_t value, std::uint64_t limit_ns) {
  if (done != nullptr) await(done, value, limit_ns);
}

extern "C" __global__ void __launch_bounds__(1)
    epd_signal_and_wait(std::uint32_t* ready, const std::uint32_t* done, std::uint32_t value,
                        std::uint64_t limit_ns) {
  if (ready == nullptr) return;
  mark(ready, value);
  await(done, value, limit_ns);
}

// Rings a command. What it needs to know is loaded together, for each load takes as long as all of them.
// Whoever closes stores `closed` and then the flags; this clears its flag and then looks at `closed`. With
// the fence between, and one on the other side, one of the two sees the other: the flag stays 1.
extern "C" __global__ void __launch_bounds__(1)
    epd_command(CommandWords* words, std::uint32_t slot, std::uint32_t program, std::uint32_t num_tokens,
                const std::uint32_t* num_tokens_at, std::uint32_t flagged, std::uint32_t waits,
                std::uint64_t limit_ns) {
  if (words == nullptr) return;
  if (flagged != 0) {
    store(&words->flags[program], 0);
    __threadfence_system();
  }
  const std::uint32_t closed = load(&words->closed);
  const std::uint32_t epoch = load(&words->epoch);
  if (num_tokens_at != nullptr) num_tokens = load(num_tokens_at);
  const std::uint32_t number = atomicAdd(&words->tail, 1);
  store(&words->rung[slot], number + 1);
  if (closed != 0) {
    store(&words->flags[program], 1);
    return;
  }
  if (num_tokens > kMostCommandTokens) num_tokens = kMostCommandTokens;
  const std::uint64_t command = epd::abi::pack({number, num_tokens, program, flagged != 0, epoch & 0xff});
  // The kernel that acquires it is on this device.
  asm volatile(
      "st.release.gpu.global.u64 [%0], %1;" ::"l"(&words->commands[number % epd::abi::kCommandSlots]),
      "l"(command)
      : "memory");
  if (waits != 0) await_end(*words, number + 1, limit_ns);
}

// For the end of the last command on the slot before this in the stream.
extern "C" __global__ void __launch_bounds__(1)
    epd_await_command(CommandWords* words, std::uint32_t slot, std::uint64_t limit_ns) {
  if (words != nullptr) await_end(*words, load(&words->rung[slot]), limit_ns);
}
