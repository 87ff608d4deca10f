// How a stream tells the engine that an operation may begin and waits for its end without stream memory
// operations: kernels of one thread. The words are StreamWords of a slot (proto/arena.h).
//
// Memory ordering. What came before in the stream has run when the kernel begins; the store that marks ready is a
// release and the load that sees done an acquire, both for the whole system, because the engine is another
// process, and its peers are other GPUs. What comes after in the stream begins when the kernel has ended.
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
