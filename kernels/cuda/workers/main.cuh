// What the warp of a gate and the CTAs of a main kernel do beside operations.
#pragma once

#include "cuda/common/signal.cuh"
#include "cuda/workers/gate.h"

namespace epd::kernels::cuda {

// ---- the gate

// Copies memory that this device's kernels and the host's copies write, but not now.
__device__ inline void copy_by_lanes(void* to, const void* from, std::uint32_t bytes) {
#pragma unroll 4
  for (std::uint32_t i = lane_of(); i < bytes / 16; i += 32)
    static_cast<uint4*>(to)[i] = __ldcg(static_cast<const uint4*>(from) + i);
}

// Copies both rings. The client's streams and host may write them, each word at once.
__device__ inline void copy_rings(Gate& gate, const abi::CallWords& words) {
  static_assert(offsetof(abi::CallWords, host_calls) == sizeof(gate.calls[0]));
  const auto* const from = reinterpret_cast<const std::uint64_t*>(words.calls);
  auto* const to = reinterpret_cast<ulonglong2*>(gate.calls);
#pragma unroll 8
  for (std::uint32_t i = lane_of(); i < sizeof(gate.calls) / 16; i += 32) to[i] = load_relaxed_pair(from + 2 * i);
}

// Enters the door, and reads all that the gate needs in one trip. All lanes call. Returns whether the enabled epoch is
// odd.
__device__ inline bool enter(const WorkerArguments& own, Gate& gate) {
  const CallArguments& calls = own.calls;
  std::uint64_t word = 0;
  if (lane_of() == 0) word = fetch_or_system(reinterpret_cast<std::uint64_t*>(own.lane->door), 1);
  if (lane_of() == 1) word = exchange_system(reinterpret_cast<std::uint64_t*>(calls.words->bell), 0);
  if (lane_of() == 2) word = load_relaxed_system(own.generation);
  copy_rings(gate, *calls.words);
  copy_by_lanes(&gate.state, calls.state, sizeof(gate.state));
  const std::uint32_t routes = calls.limits.num_routes < Gate::kRoutes ? calls.limits.num_routes : Gate::kRoutes;
  copy_by_lanes(gate.routes, calls.routes, routes * sizeof(RouteState));
  const auto epoch = static_cast<std::uint32_t>(__shfl_sync(kFull, word, 0) >> 32);
  const auto generation = static_cast<std::uint32_t>(__shfl_sync(kFull, word, 2));
  if (lane_of() == 0) {
    gate.enabled_epoch = epoch;
    gate.generation = generation;
  }
  __syncwarp();
  return epoch % 2 != 0;
}

// ---- composing a call's operation in a CTA's shared memory, by all its threads

// A CTA's copy of the group view and of the call's work division.
struct ViewCopy {
  alignas(16) std::uint8_t view[sizeof(DeviceView)];
  alignas(16) WorkDivision division;

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

// Composes the operation. Each of the first warps composes a part: one thread would take a microsecond for all.
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

// Composes the work's operation. All threads call. The view is in the copy, behind a barrier.
__device__ inline void compose_work(const CallArguments& own, const Work& work, ViewCopy& copy, Operation& op) {
  const TakenCall& call = work.call;
  // This fence orders earlier accesses before the bulk copies that the signal warp issues first (OwnRows).
  if (warp_of() == signal_warp()) fence_async();
  EPD_BELOW(call.block, own.limits.depth);
  EPD_BELOW(call.slot, own.limits.depth);
  EPD_BELOW(call.route, own.limits.num_routes);
  EPD_BELOW(abi::format_of(call.flags), own.limits.num_formats);
  const std::uint32_t at = division_index(call, own.most_ctas, work.ctas);
  EPD_BELOW(at, kDivisionKinds * own.most_ctas);
  copy_by_threads(&copy.division, own.division + at);
  if (threadIdx.x == blockDim.x - 1 && is_dispatch(call)) op.shape.format = row_format(copy.get().group, call);
  __syncthreads();
  compose_by_warps(own, call, copy.get(), copy.division, op);
  __syncthreads();
  if (!has_flag(call, abi::kFlagPlaces)) return;
  if (threadIdx.x == 0) take_own_places(op, load_places(*own.words, call));
  __syncthreads();
}

}  // namespace epd::kernels::cuda
