// A kernel that stays: what its CTAs do between operations.
#pragma once

#include "cuda/commands.cuh"
#include "cuda/expand.cuh"
#include "cuda/partial_sums.cuh"

namespace epd::kernels::cuda {

struct Entry {
  Task task;
  std::uint32_t place;  // or program
  bool by_command;
  bool failed;  // it does not run
};

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
    if (looks > kEagerLooks) __nanosleep(kPauseNs);
  }
}

// Heralds before this kernel's first one. Each CTA asks before it has left any: until then there is no more,
// and a kernel that was stopped before has been left by all its CTAs.
__device__ inline std::uint32_t first_herald(const ResidentState& state) {
  return static_cast<std::uint32_t>(load_acquire(&state.left));
}

// Until all CTAs have left herald - 1. Whether it failed.
__device__ inline bool await_left(const ResidentState& state, std::uint32_t herald) {
  while (true) {
    const std::uint64_t left = load_acquire(&state.left);
    if (static_cast<std::uint32_t>(left) == herald) return left >> 32 != 0;
  }
}

// Of CTA 0 of a lane that takes no commands: the queue's next entry, or Herald::kAside.
__device__ inline HeraldWord await_queue(const ResidentArguments& own, Watch& watch) {
  for (std::uint32_t looks = 1;; ++looks) {
    const std::uint64_t entry = load_acquire_system(own.state->entries + watch.entry % kQueueEntries);
    if (static_cast<std::uint32_t>(entry >> 32) == watch.entry + 1) {
      if (!is_of_former_round(own, entry)) return static_cast<HeraldWord>(entry);
      ++watch.entry;
      continue;
    }
    if (looks % kLooksPerRound == 0) {
      const HeraldWord aside = look_aside(own, watch);
      if (aside != 0) return aside;
    }
    if (looks > kEagerLooks) __nanosleep(kPauseNs);
  }
}

// Of CTA 0: the next thing to do, when all CTAs have left what was before. One thread. With commands the host
// hears of that first; without any, entries are looked for meanwhile.
__device__ inline HeraldWord find_work(const ResidentArguments& own, Watch& watch, std::uint32_t herald) {
  if (own.commands.words == nullptr) {
    const HeraldWord found = await_queue(own, watch);
    await_left(*own.state, herald);
    return found;
  }
  const bool failed = await_left(*own.state, herald);
  conclude(own.commands, watch, failed);
  return await_work(own, watch);
}

// Of CTA 0, for all: until the client's stream has got as far as the operation. One thread; what the stream
// wrote before is visible to whoever sees the herald. What is to be heralded: `found`, that it has failed, or
// Herald::kAside (the next kernel waits on).
__device__ inline HeraldWord await_ready(const ResidentArguments& own, const Operation& op, HeraldWord found) {
  if (op.signal.ready == nullptr) return found;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
#pragma unroll 1
  for (std::uint32_t looks = 1;; ++looks) {
    const auto ahead = static_cast<std::int32_t>(load_acquire_system(op.signal.ready) - op.signal.value);
    if (ahead >= 0) return found;
    if (looks % 64 == 0 && must_leave(op, deadline_ns, 0))
      return found | static_cast<HeraldWord>(Herald::kFailed);
    if (looks % kLooksPerRound == 0 && round_is_over(own)) return static_cast<HeraldWord>(Herald::kAside);
  }
}

// CTA 0 brings the operation of an entry from the host's memory for all. All its threads call.
__device__ inline void bring(const Operation* given, Operation* to) {
  const auto* const from = reinterpret_cast<const uint4*>(given);
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(to)[i] = __ldcv(from + i);
  __syncthreads();
}

__device__ inline Entry entry_of(HeraldWord found) {
  return {static_cast<Task>(found >> 16 & 0x1fff), found & 0xffff, (found & Herald::kByCommand) != 0,
          (found & Herald::kFailed) != 0};
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
  const bool brings = !entry.by_command && entry.task != Task::kStop;
  if (brings) {
    Operation* const op = own.operations + entry.place;
    bring(own.given + entry.place, op);
    if (threadIdx.x == 0) found = await_ready(own, *op, found);
    __syncthreads();
    entry = entry_of(found);
  }
  if (threadIdx.x == 0) {
    if ((found & (Herald::kByCommand | Herald::kAside)) == 0) ++watch.entry;
    if (entry.task == Task::kStop) end_watch(own, watch);
    if (brings) fence_device();
    store_release(&state.herald.entry, std::uint64_t{herald + 1} << 32 | found);
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
