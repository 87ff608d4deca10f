// A kernel that stays: what its CTAs do between operations.
#pragma once

#include "cuda/control.h"
#include "cuda/expand.cuh"
#include "cuda/partial_sums.cuh"

namespace epd::kernels::cuda {

// Programs, that they are in L2 when they are asked for, whatever else has gone through it. A line with each
// look, of a thread of each CTA but the first.
class ProgramsAtHand {
 public:
  __device__ explicit ProgramsAtHand(const Program* programs)
      : programs_(reinterpret_cast<const std::uint8_t*>(programs)), line_(blockIdx.x - 1) {}
  __device__ void touch() {
    if (programs_ == nullptr) return;
    prefetch(programs_ + std::size_t{line_} * kLineBytes);
    line_ += gridDim.x - 1;
    if (line_ >= abi::kMaxPrograms * sizeof(Program) / kLineBytes) line_ = blockIdx.x - 1;
  }

 private:
  static constexpr std::uint32_t kLineBytes = 128;
  const std::uint8_t* const programs_;
  std::uint32_t line_;
};

// Until `at` holds entry `index`. One thread.
__device__ inline std::uint64_t await_entry(const std::uint64_t* at, std::uint32_t index,
                                            ProgramsAtHand programs) {
  for (std::uint32_t looks = 0;; ++looks) {
    programs.touch();
    const std::uint64_t entry = load_acquire_system(at);
    if (static_cast<std::uint32_t>(entry >> 32) == index + 1) return entry;
    pause(looks);
  }
}

// CTA 0 brings the operation of an entry from the host's memory for all. All its threads call.
__device__ inline void bring(const Operation* given, Operation* to) {
  const auto* const from = reinterpret_cast<const uint4*>(given);
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(to)[i] = __ldcv(from + i);
  __syncthreads();
}

// What all CTAs do next; an operation of the queue lies in device memory then, and its client's stream has
// got as far. All threads of the CTA call.
__device__ inline Entry next_entry(const ResidentArguments& own, Watch& watch, std::uint32_t herald) {
  __shared__ HeraldWord found;
  ResidentState& state = *own.state;
  const bool leads = blockIdx.x == 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    const ProgramsAtHand programs(own.commands.programs);
    found = leads ? find_work(own, watch, herald)
                  : static_cast<HeraldWord>(await_entry(&state.herald.entry, herald, programs));
  }
  __syncthreads();
  Entry entry = entry_of(found);
  if (!leads) return entry;
  const bool brings = is_brought(entry);
  if (brings) {
    Operation* const op = own.operations + entry.place;
    bring(own.given + entry.place, op);
    if (threadIdx.x == 0) found = await_ready(own, *op, found);
    __syncthreads();
    entry = entry_of(found);
  }
  if (threadIdx.x == 0) {
    pass_entry(own, watch, found, entry);
    if (brings) fence_device();
    tell_entry(state, herald, found);
  }
  return entry;
}

// No CTA of a kernel that is over may wait for what the next one is told: all of them count.
__device__ inline void leave_kernel(ResidentState& state, std::uint32_t herald) {
  if (threadIdx.x != 0) return;
  if (count_up(&state.leaving, gridDim.x - 1) == gridDim.x - 1)
    store_release(&state.left, std::uint64_t{herald + 1});
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
  if (lands(op)) {
    if (task == Task::kDispatch) run_landing_dispatch(op, memory);
    if (task == Task::kCombinePerExpert) run_landing_combine(op, memory);
    return;
  }
  if (task == Task::kDispatch) resident_dispatch(op, cta, memory);
  if (task == Task::kCombine) resident_combine<false>(op, cta, memory);
  if (task == Task::kCombinePerExpert) resident_combine<true>(op, cta, memory);
}

}  // namespace epd::kernels::cuda
