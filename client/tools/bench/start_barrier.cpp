#include "start_barrier.h"

#include "bench/kernel_arguments.h"

#include <atomic>
#include <exception>
#include <limits>

namespace epd::bench {
namespace {

// Of cuda.h.
constexpr unsigned kPortableMapped = 3;

}  // namespace

BarrierWords::BarrierWords(std::uint32_t ranks) : ranks_(ranks), words_(std::size_t{1 + ranks} * kLine) {
  static_assert(gpu_test::kMaxBarrierDevices <= kLine);
}

StartBarrier::StartBarrier(const GpuRank& gpu, const BarrierWords& words, std::uint32_t rank)
    : gpu_(gpu),
      words_(words),
      rank_(rank),
      image_(gpu_driver()),
      kernel_(image_.kernel("start_barrier_kernel")) {
  const GpuDriver& driver = gpu_driver();
  driver.require(driver.register_host(words_.come(), words_.bytes(), kPortableMapped), "cuMemHostRegister");
}

// Who fails before it has opened the start barrier leaves its stream there: that has to go on, and the words
// stay where it looks at them until the process ends. Ranks that end well end together.
StartBarrier::~StartBarrier() {
  constexpr std::uint64_t kAlways = std::numeric_limits<std::uint64_t>::max();
  const auto set = [](std::uint64_t* word) {
    std::atomic_ref(*word).store(kAlways, std::memory_order_release);
  };
  set(words_.opened(rank_));
  for (std::uint32_t rank = 0; rank < words_.ranks(); ++rank) set(words_.come() + rank);
  if (std::uncaught_exceptions() == 0) gpu_driver().unregister_host(words_.come());
}

void StartBarrier::enqueue() {
  gpu_test::BarrierLines lines{};
  lines.count = words_.ranks();
  for (std::uint32_t rank = 0; rank < words_.ranks(); ++rank) lines.at[rank] = words_.come();
  std::uint32_t rank = rank_;
  const std::uint64_t* opened = words_.opened(rank_);
  void* arguments[] = {&lines, &rank, &opened};
  image_.launch(kernel_, {.threads = gpu_test::kBarrierThreads}, gpu_.stream(), arguments);
}

void StartBarrier::open() {
  std::atomic_ref(*words_.opened(rank_)).store(++times_, std::memory_order_release);
}

}  // namespace epd::bench
