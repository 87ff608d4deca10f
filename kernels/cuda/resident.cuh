// A kernel that stays: what its CTAs do between operations.
#pragma once

#include "cuda/expand.cuh"
#include "cuda/partial_sums.cuh"

namespace epd::kernels::cuda {

struct Entry {
  Task task;
  std::uint32_t place;
};

// Looks without a pause for some milliseconds, then now and then. (A look takes 0.7 us.)
inline constexpr std::uint32_t kEagerLooks = 4096;
inline constexpr std::uint32_t kPauseNs = 200;

// Until `at` holds entry `index`. One thread.
__device__ inline std::uint64_t await_entry(const std::uint64_t* at, std::uint32_t index) {
  for (std::uint32_t looks = 0;; ++looks) {
    const std::uint64_t entry = load_acquire_system(at);
    if (static_cast<std::uint32_t>(entry >> 32) == index + 1) return entry;
    if (looks > kEagerLooks) __nanosleep(kPauseNs);
  }
}

// CTA 0 brings the operation of an entry from the host's memory for all. All its threads call.
__device__ inline void bring(const Operation* given, Operation* to) {
  const auto* const from = reinterpret_cast<const uint4*>(given);
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(to)[i] = __ldcv(from + i);
  __syncthreads();
}

// Entry `index`, when it is there and all CTAs have left the one before; its operation lies in device memory
// then. All threads of the CTA call.
__device__ inline Entry next_entry(const ResidentArguments& own, std::uint32_t index) {
  __shared__ std::uint64_t found;
  ResidentState& state = *own.state;
  const bool leads = blockIdx.x == 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    found = await_entry(leads ? state.entries + index % kQueueEntries : &state.entry, index);
    while (leads && load_acquire(&state.left) != index) {
    }
  }
  __syncthreads();
  const Entry entry{static_cast<Task>(found >> 16 & 0xffff), static_cast<std::uint32_t>(found & 0xffff)};
  if (!leads) return entry;
  if (entry.task != Task::kStop) bring(own.given + entry.place, own.operations + entry.place);
  if (threadIdx.x == 0) {
    if (entry.task == Task::kStop) state.left = index + 1;
    fence_device();
    store_release(&state.entry, found);
  }
  return entry;
}

// Each with registers of its own: together they would need more than there are.
__device__ __noinline__ inline void resident_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  run_dispatch(op, cta, memory);
}
template <bool kPerExpert>
__device__ __noinline__ inline void resident_combine(const Operation& op, Cta cta, std::uint8_t* memory) {
  run_combine<kPerExpert>(op, cta, memory);
}

__device__ inline void run_task(Task task, const Operation& op, Cta cta, std::uint8_t* memory) {
  if (task == Task::kNoop && cta.index == 0 && threadIdx.x == 0) {
    tell_stream(op);
    publish(op, ended(OpError::kNone, -1));
  }
  if (cta.index >= cta.count) return;  // it may not use all SMs
  if (task == Task::kDispatch) resident_dispatch(op, cta, memory);
  if (task == Task::kCombine) resident_combine<false>(op, cta, memory);
  if (task == Task::kCombinePerExpert) resident_combine<true>(op, cta, memory);
}

}  // namespace epd::kernels::cuda
