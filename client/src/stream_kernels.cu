// The kernels of stream_words.h: one thread each.
#include "stream_words.h"

#include <cstdint>

using namespace epd::stream_kernels;

// With a null word the kernels do nothing. Such a launch loads them, see stream_kernels.cpp.

extern "C" __global__ void __launch_bounds__(1) epd_signal(std::uint32_t* ready, std::uint32_t value) {
  if (ready != nullptr) store_release_system(ready, value);
}

// Ends after limit_ns, even if the word has not come.
extern "C" __global__ void __launch_bounds__(1)
    epd_wait(const std::uint32_t* done, std::uint32_t value, std::uint64_t limit_ns) {
  if (done != nullptr) await(done, value, limit_ns);
}

extern "C" __global__ void __launch_bounds__(1)
    epd_signal_and_wait(std::uint32_t* ready, const std::uint32_t* done, std::uint32_t value,
                        std::uint64_t limit_ns) {
  if (ready == nullptr) return;
  store_release_system(ready, value);
  await(done, value, limit_ns);
}

extern "C" __global__ void __launch_bounds__(1) epd_enqueue(CallWords* words, Enqueued its) {
  if (words != nullptr) enqueue(*words, its);
}

extern "C" __global__ void __launch_bounds__(1)
    epd_await_call(CallWords* words, std::uint32_t slot, std::uint64_t limit_ns) {
  if (words != nullptr) await_last(*words, slot, limit_ns);
}
