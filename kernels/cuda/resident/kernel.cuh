// The resident kernel: what all CTAs do between operations.
#pragma once

#include "cuda/common/signal.cuh"
#include "cuda/resident/work.h"

namespace epd::kernels::cuda {

// Waits for work broadcast number `index` and returns its task and call. One warp calls, and each lane polls
// one word.
__device__ inline Task await_task(const WorkBroadcast& broadcast, std::uint32_t index, TakenCall& call) {
  const std::uint32_t lane = lane_of();
  const std::uint64_t* const words = &broadcast.task;
  static_assert(offsetof(WorkBroadcast, call) == sizeof(broadcast.task) && WorkBroadcast::kWords <= 32);
  for (std::uint32_t polls = 0;; ++polls) {
    const std::uint64_t word = load_acquire_system(words + (lane < WorkBroadcast::kWords ? lane : 0));
    if (__all_sync(kFull, static_cast<std::uint32_t>(word >> 32) == index + 1)) {
      if (lane > 0 && lane < WorkBroadcast::kWords)
        reinterpret_cast<std::uint32_t*>(&call)[lane - 1] = static_cast<std::uint32_t>(word);
      return static_cast<Task>(__shfl_sync(kFull, static_cast<std::uint32_t>(word), 0));
    }
    pause(polls);
  }
}

// Returns what all CTAs do next. `call` becomes the call; CTA 0 uses Watch::running in its place. All threads
// of the CTA call.
__device__ inline Task next_task(const ResidentArguments& own, Watch& watch, TakenCall& call,
                                 std::uint32_t index) {
  __shared__ Task task;
  __syncthreads();
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) {
      task = find_work(own, watch, index);
      broadcast_task(own.state->broadcast, index, task, watch.running);
    }
  } else if (warp_of() == 0) {
    const Task received = await_task(own.state->broadcast, index, call);
    if (lane_of() == 0) task = received;
  }
  __syncthreads();
  return task;
}

// ---- composing a call's operation in a CTA's shared memory, by all its threads

// A CTA's copy of the group view and of the last work division of each kind. A call loads only what has
// changed since the call before.
struct ViewCopy {
  alignas(16) std::uint8_t view[sizeof(DeviceView)];
  alignas(16) WorkDivision division[2];  // of dispatches, of combines
  std::uint32_t divisions_at[2];         // their index in CallArguments::division; or kNone
  std::uint32_t enabled_epoch;           // enabled epoch of the view; 0: no view
  static constexpr std::uint32_t kNone = ~0u;

  __device__ const DeviceView& get() const { return *reinterpret_cast<const DeviceView*>(view); }
};

// Copies a struct from device memory into shared memory. All threads call.
template <typename T>
__device__ inline void copy_by_threads(T* to, const T* from) {
  static_assert(sizeof(T) % 16 == 0);
  const auto* const source = reinterpret_cast<const uint4*>(from);
  for (std::uint32_t i = threadIdx.x; i < sizeof(T) / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(to)[i] = __ldcg(source + i);
}

// Marks the copy as empty.
__device__ inline void begin_view(ViewCopy& copy) {
  if (threadIdx.x != 0) return;
  copy.enabled_epoch = 0;
  copy.divisions_at[0] = copy.divisions_at[1] = ViewCopy::kNone;
}

// Loads the group view if the enabled epoch has changed. Only odd epochs have calls, so 0 never matches.
__device__ inline void load_view(const CallArguments& own, const TakenCall& call, ViewCopy& copy,
                                 Operation& op) {
  if (copy.enabled_epoch == call.enabled_epoch) return;
  copy_by_threads(reinterpret_cast<DeviceView*>(copy.view), own.view);
  __syncthreads();
  if (threadIdx.x == 0) {
    compose_constants(op, copy.get().group);
    copy.enabled_epoch = call.enabled_epoch;
    copy.divisions_at[0] = ViewCopy::kNone;  // a dispatch then takes its row format again
  }
  __syncthreads();
}

// Returns the call's work division; loads it if the last operation of its kind had another one. Dispatches of
// other row formats have other divisions, so a dispatch's row format is also loaded then.
__device__ inline const WorkDivision& load_division(const CallArguments& own, const TakenCall& call,
                                                    ViewCopy& copy, Operation& op) {
  const std::uint32_t kind = is_dispatch(call) ? 0 : 1;
  const std::uint32_t at = division_index(call, own.most_ctas, gridDim.x);
  EPD_BELOW(at, kDivisionKinds * own.most_ctas);
  if (copy.divisions_at[kind] == at) return copy.division[kind];
  __syncthreads();
  copy_by_threads(copy.division + kind, own.division + at);
  if (threadIdx.x == 0) {
    copy.divisions_at[kind] = at;
    if (kind == 0) op.shape.format = row_format(copy.get().group, call);
  }
  __syncthreads();
  return copy.division[kind];
}

// Composes the operation. Each of the first warps composes a part: one thread would take a microsecond for
// all.
__device__ inline void compose_by_warps(const CallArguments& own, const TakenCall& call,
                                        const DeviceView& view, const WorkDivision& division, Operation& op) {
  const std::uint32_t lane = lane_of();
  switch (warp_of()) {
    case 0:
      if (lane < view.group.shape.num_ranks)
        compose_peer_exchange(op.peers[lane], view.group.exchange, view.peers[lane], call);
      break;
    case 1:
      if (lane < abi::kNumRegions) compose_region(op, view.group, lane, call);
      break;
    case 2:
      if (lane < sizeof(WorkDivision) / 16)
        reinterpret_cast<uint4*>(&op.division)[lane] = reinterpret_cast<const uint4*>(&division)[lane];
      break;
    case 3:
      if (lane == 0) compose_announcement(op, call);
      break;
    case 4:
      if (lane == 0) compose_routing(op, view.group, call);
      break;
    case 5:
      if (lane == 0) compose_ends(op, own, call);
      break;
    case 6:
      if (lane < view.group.shape.num_ranks) compose_peer_rows(op.peers[lane], view.peers[lane], call);
      break;
    default: break;
  }
}

// Loads the places of a call's rows. A client may change them at any time: what CTAs then find differently is
// the client's own.
__device__ inline abi::RowPlaces load_places(const abi::CallWords& words, const TakenCall& call) {
  const abi::RowPlaces& places = words.places[call.number % abi::kCallSlots];
  return {load_relaxed_system(&places.in), load_relaxed_system(&places.out)};
}

// Composes a call's operation. All threads call. `op` still holds the operation of the call before.
__device__ inline void compose_call(const CallArguments& own, const TakenCall& call, ViewCopy& copy,
                                    Operation& op) {
  // This fence orders earlier accesses before the bulk copies that the signal warp issues first (OwnRows).
  if (warp_of() == signal_warp()) fence_async();
  EPD_BELOW(call.block, own.limits.depth);
  EPD_BELOW(call.slot, own.limits.depth);
  EPD_BELOW(call.route, own.limits.num_routes);
  EPD_BELOW(abi::format_of(call.flags), own.limits.num_formats);
  load_view(own, call, copy, op);
  const WorkDivision& division = load_division(own, call, copy, op);
  compose_by_warps(own, call, copy.get(), division, op);
  __syncthreads();
  if (!has_flag(call, abi::kFlagPlaces)) return;
  if (threadIdx.x == 0) take_own_places(op, load_places(*own.words, call));
  __syncthreads();
}

// Counts the CTA as it leaves the kernel. The last CTA counts the stop as left. So no CTA of this kernel can
// take up a broadcast of the next kernel.
__device__ inline void leave_kernel(ResidentState& state, std::uint32_t index) {
  if (threadIdx.x != 0) return;
  if (count_up(&state.leaving, gridDim.x - 1) == gridDim.x - 1)
    store_release(&state.left, std::uint64_t{index + 1});
}

}  // namespace epd::kernels::cuda
