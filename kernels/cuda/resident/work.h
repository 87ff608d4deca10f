// The resident kernel: how one thread of CTA 0 finds the next task for all CTAs. The code compiles for device
// and host (proto/ordered.h).
#pragma once

#include "cuda/resident/watch.h"

#include <cstring>

namespace epd::kernels::cuda {

// Returns the number of this kernel's first work broadcast. Every CTA reads it before it leaves a broadcast,
// so the number has not grown yet. All CTAs of the kernel before have left that kernel.
EPD_DEVICE inline std::uint32_t first_broadcast(const ResidentState& state) {
  return static_cast<std::uint32_t>(load_acquire(&state.left));
}

// Waits until all CTAs have left broadcast index - 1. Returns whether its operation failed.
EPD_DEVICE inline bool await_left(const ResidentState& state, std::uint32_t index) {
  while (true) {
    const std::uint64_t left = load_acquire(&state.left);
    if (static_cast<std::uint32_t>(left) == index) return left >> 32 != 0;
    look_again(1);
  }
}

// Finds the next task, when all CTAs have left the last one and its end is reported. One thread of CTA 0
// calls.
EPD_DEVICE inline Task find_work(const ResidentArguments& own, Watch& watch, std::uint32_t index) {
  const ResultRuns runs = watch.runs ? runs_of(own.calls, watch.running.result) : ResultRuns{};
  const bool failed = await_left(*own.state, index);
  conclude(own.calls, watch, failed, runs);
  const Task task = await_work(own, watch);
  if (task == Task::kStop) end_watch(own, watch);
  return task;
}

// Broadcasts the task and its call to all CTAs.
EPD_DEVICE inline void broadcast_task(WorkBroadcast& broadcast, std::uint32_t index, Task task,
                                      const TakenCall& call) {
  const std::uint64_t number = std::uint64_t{index + 1} << 32;
  std::uint32_t words[TakenCall::kWords];
  std::memcpy(words, &call, sizeof(words));
  fence_device();
  for (std::uint32_t i = 0; i < TakenCall::kWords; ++i) store_relaxed(&broadcast.call[i], number | words[i]);
  store_relaxed(&broadcast.task, number | static_cast<std::uint32_t>(task));
}

}  // namespace epd::kernels::cuda
