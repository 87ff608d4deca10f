// A kernel that stays: what its CTAs do between operations.
#pragma once

#include "cuda/combine.cuh"
#include "cuda/dispatch.cuh"

namespace epd::kernels::cuda {

struct Entry {
  Task task;
  std::uint32_t place;
};

// Looks at once for about this long (a look takes 0.7 us), then now and then.
inline constexpr std::uint32_t kEagerLooks = 4096;
inline constexpr std::uint32_t kPauseNs = 200;

// Entry `index`, when it is there and all CTAs have left the one before. All threads of the CTA call; then
// they see what the host wrote before it.
__device__ inline Entry next_entry(const ResidentQueue& queue, std::uint32_t index) {
  __shared__ std::uint64_t entry;
  __syncthreads();
  if (threadIdx.x == 0) {
    const std::uint64_t* const at = &queue.entries[index % kQueueEntries];
    for (std::uint32_t looks = 0;; ++looks) {
      entry = load_acquire_system(at);
      const bool there = static_cast<std::uint32_t>(entry >> 32) == index + 1;
      if (there && load_acquire(&queue.left) == index) break;
      if (looks > kEagerLooks) __nanosleep(kPauseNs);
    }
  }
  __syncthreads();
  return {static_cast<Task>(entry >> 16 & 0xffff), static_cast<std::uint32_t>(entry & 0xffff)};
}

__device__ inline void run_task(Task task, const Operation& op, Cta cta, std::uint8_t* memory) {
  if (task == Task::kNoop && cta.index == 0 && threadIdx.x == 0) {
    tell_stream(op);
    publish(op, ended(OpError::kNone, -1));
  }
  if (cta.index >= cta.count) return;  // it may not use all SMs
  if (task == Task::kDispatch) run_dispatch(op, cta, memory);
  if (task == Task::kCombine) run_combine<false>(op, cta, memory);
  if (task == Task::kCombinePerExpert) run_combine<true>(op, cta, memory);
}

}  // namespace epd::kernels::cuda
