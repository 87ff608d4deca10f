// A kernel that stays: what its CTA 0 finds for all to do, by one thread. For device and host, see
// proto/ordered.h.
#pragma once

#include "cuda/resident/calls.h"

#include <cstring>

namespace epd::kernels::cuda {

// Heralds before this kernel's first one. Each CTA asks before it has left any: until then there is no more,
// and a kernel that was stopped before has been left by all its CTAs.
EPD_DEVICE inline std::uint32_t first_broadcast(const ResidentState& state) {
  return static_cast<std::uint32_t>(load_acquire(&state.left));
}

// Until all CTAs have left herald - 1. Whether it failed.
EPD_DEVICE inline bool await_left(const ResidentState& state, std::uint32_t index) {
  while (true) {
    const std::uint64_t left = load_acquire(&state.left);
    if (static_cast<std::uint32_t>(left) == index) return left >> 32 != 0;
    look_again(1);
  }
}

// Of CTA 0: the next thing to do, when all CTAs have left what was before, and the host can hear of that. One
// thread.
EPD_DEVICE inline Task find_work(const ResidentArguments& own, Watch& watch, std::uint32_t index) {
  const ResultRuns runs = watch.runs ? runs_of(own.commands, watch.running.result) : ResultRuns{};
  const bool failed = await_left(*own.state, index);
  conclude(own.commands, watch, failed, runs);
  const Task task = await_work(own, watch);
  if (task == Task::kStop) end_watch(own, watch);
  return task;
}

// What all CTAs do next, and with which call.
EPD_DEVICE inline void broadcast_task(Herald& broadcast, std::uint32_t index, Task task,
                                      const TakenCall& call) {
  const std::uint64_t number = std::uint64_t{index + 1} << 32;
  std::uint32_t words[TakenCall::kWords];
  std::memcpy(words, &call, sizeof(words));
  fence_device();
  for (std::uint32_t i = 0; i < TakenCall::kWords; ++i) store_relaxed(&broadcast.call[i], number | words[i]);
  store_relaxed(&broadcast.task, number | static_cast<std::uint32_t>(task));
}

}  // namespace epd::kernels::cuda
