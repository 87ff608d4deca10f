// The work of a gate's warp and of a main kernel's CTAs beside operations.
#pragma once

#include "cuda/common/signal.cuh"
#include "cuda/workers/call_gate.h"

namespace epd::kernels::cuda {

// ---- the gate

// A lane's part of what a gate reads: all of it is loaded before any is used, so that it takes one trip.
struct GateLoads {
  static constexpr std::uint32_t kRingVectors = sizeof(Gate::calls) / 16 / 32;
  static_assert(sizeof(Gate::calls) % (16 * 32) == 0 && sizeof(CallState) / 16 <= 32 && Gate::kRoutes <= 32);
  ulonglong2 rings[kRingVectors];
  uint4 state;
  uint4 route;
  std::uint64_t word;
};

__device__ inline std::uint32_t kept_routes(const CallArguments& calls) {
  return calls.limits.num_routes < Gate::kRoutes ? calls.limits.num_routes : Gate::kRoutes;
}

// Enters the door, clears the bell, asks for SMs. The first lanes each do one of these.
__device__ inline std::uint64_t enter_by_lane(const WorkerArguments& own, std::uint32_t asks) {
  switch (lane_of()) {
    case 0: return fetch_or_system(reinterpret_cast<std::uint64_t*>(own.lane->door), 1);  // inside
    case 1: return exchange_system(reinterpret_cast<std::uint64_t*>(own.calls.words->bell), 0);
    case 2: return load_relaxed_system(own.generation);
    case 3: return load_relaxed_system(&own.credits->limit);
    case 4: return asks == 0 ? 0 : add(&own.credits->held, asks) + asks;
    default: return 0;
  }
}

// Reads all that the gate needs. All lanes call. `lingering` and `asks`: Gate::lingering and Gate::asked.
// Returns whether the enabled epoch is odd.
__device__ inline bool enter(const WorkerArguments& own, Gate& gate, std::uint32_t lingering,
                             std::uint32_t asks) {
  const CallArguments& calls = own.calls;
  const std::uint32_t lane = lane_of();
  GateLoads loads;
  static_assert(offsetof(abi::CallWords, host_calls) == sizeof(gate.calls[0]));
  const auto* const rings = reinterpret_cast<const std::uint64_t*>(calls.words->calls);
#pragma unroll
  for (std::uint32_t i = 0; i < GateLoads::kRingVectors; ++i)
    loads.rings[i] = load_relaxed_pair(rings + 2 * (i * 32 + lane));
  if (lane < sizeof(CallState) / 16) loads.state = __ldcg(reinterpret_cast<const uint4*>(calls.state) + lane);
  if (lane < kept_routes(calls)) loads.route = __ldcg(reinterpret_cast<const uint4*>(calls.routes) + lane);
  loads.word = enter_by_lane(own, asks);
#pragma unroll
  for (std::uint32_t i = 0; i < GateLoads::kRingVectors; ++i)
    reinterpret_cast<ulonglong2*>(gate.calls)[i * 32 + lane] = loads.rings[i];
  if (lane < sizeof(CallState) / 16) reinterpret_cast<uint4*>(&gate.state)[lane] = loads.state;
  if (lane < kept_routes(calls)) reinterpret_cast<uint4*>(gate.routes)[lane] = loads.route;
  if (lane == 0) gate.enabled_epoch = static_cast<std::uint32_t>(loads.word >> 32);
  if (lane == 2) gate.generation = static_cast<std::uint32_t>(loads.word);
  if (lane == 3) gate.limit = static_cast<std::uint32_t>(loads.word);
  if (lane == 4) gate.held = static_cast<std::uint32_t>(loads.word);
  if (lane == 5) gate.lingering = lingering;
  if (lane == 6) gate.asked = asks;
  __syncwarp();
  return gate.enabled_epoch % 2 != 0;
}

// Hands Gate::work to the main kernel, as work number `number`. All lanes call.
__device__ inline void hand_over(const WorkerArguments& own, const Gate& gate, std::uint32_t number) {
  static_assert(Work::kWords <= 32);
  const std::uint32_t lane = lane_of();
  const auto* const work = reinterpret_cast<const std::uint32_t*>(&gate.work);
  fence_call(gate);
  if (lane < Work::kWords)
    store_relaxed(&own.lane->work.words[lane], std::uint64_t{number} << 32 | work[lane]);
}

// Stores what the gate keeps. All lanes call.
__device__ inline void keep(const WorkerArguments& own, const Gate& gate) {
  static_assert(sizeof(WorkEnd) == 64);
  const std::uint32_t lane = lane_of();
  if (lane < (sizeof(CallState) - kKeptState) / 16)
    (reinterpret_cast<uint4*>(own.calls.state) + kKeptState / 16)[lane] =
        (reinterpret_cast<const uint4*>(&gate.state) + kKeptState / 16)[lane];
  if (lane < sizeof(WorkEnd) / 16)
    reinterpret_cast<uint4*>(&own.lane->end)[lane] = reinterpret_cast<const uint4*>(&gate.end)[lane];
  if (lane == 31 && gate.work.task != Task::kNone)
    own.lane->divisions[is_dispatch(gate.work.call) ? 0 : 1] =
        division_index(gate.work.call, own.calls.most_ctas, gate.work.ctas);
}

// ---- the main kernel

// Waits for the gate's decision. The first warp calls; its lanes each poll one word. A main kernel that
// lingers may have gone on to later work of the pair before this CTA began: then that is taken. It lets a CTA
// that has no part in any of them leave as well.
__device__ inline void await_work(const WorkerArguments& own, std::uint32_t number, Work& work) {
  const std::uint32_t lane = lane_of();
  const std::uint64_t* const word = own.lane->work.words + (lane < Work::kWords ? lane : 0);
  std::uint64_t value = 0;
  std::uint32_t first = 0;
#pragma unroll 1
  do {
    value = load_acquire(word);
    first = __shfl_sync(kFull, static_cast<std::uint32_t>(value >> 32), 0);
  } while (!__all_sync(kFull, static_cast<std::uint32_t>(value >> 32) == first) ||
           first - number >= kWorksOfPair);
  __syncwarp();  // `number` may be of the work that is overwritten
  if (lane < Work::kWords) reinterpret_cast<std::uint32_t*>(&work)[lane] = static_cast<std::uint32_t>(value);
}

// Returns the number of CTAs that do not leave at once.
__device__ inline std::uint32_t most_ctas(const Work& work) {
  return max(std::uint32_t{work.ctas}, std::uint32_t{work.lingering});
}

// Polls the words that may let a main kernel that lingers continue. All lanes call. Returns whether the bell
// is set.
__device__ inline bool look_at_words(const WorkerArguments& own, Gate& gate) {
  const std::uint32_t lane = lane_of();
  __syncwarp();  // the words of the look before have been read
  std::uint64_t word = 0;
  ulonglong2 pair{};
  if (lane == 0) word = load_relaxed_system(reinterpret_cast<const std::uint64_t*>(own.lane->door));
  if (lane == 1) word = load_relaxed_system(reinterpret_cast<const std::uint64_t*>(own.calls.words->bell));
  if (lane == 2) word = load_relaxed_system(own.generation);
  const auto ring = static_cast<CallRing>(lane / 2 % kCallRings);
  const std::uint32_t next = gate.state.sequence[ring];
  if (lane >= 4 && lane < 8)
    pair = load_relaxed_pair(place_in(own.calls, ring, next)->words + 2 * (lane % 2));
  static_assert(kKeptState == 4 * sizeof(pair));
  if (lane >= 8 && lane < 12)
    pair = load_relaxed_pair(reinterpret_cast<const std::uint64_t*>(own.calls.state) + 2 * (lane - 8));
  if (lane == 0) gate.enabled_epoch = static_cast<std::uint32_t>(word >> 32);
  if (lane == 2) gate.generation = static_cast<std::uint32_t>(word);
  if (lane >= 4 && lane < 8)
    reinterpret_cast<ulonglong2*>(&gate.calls[ring][next % abi::kCallSlots])[lane % 2] = pair;
  if (lane >= 8 && lane < 12) reinterpret_cast<ulonglong2*>(&gate.state)[lane - 8] = pair;
  __syncwarp();
  return __shfl_sync(kFull, word != 0, 1) != 0;
}

// Waits for a call, or for the bell if a call stands. All lanes call. Returns false if the time is up.
__device__ inline bool await_call(const WorkerArguments& own, Gate& gate, bool stands,
                                  std::uint64_t until_ns) {
  bool cleared = false;
#pragma unroll 1
  for (std::uint32_t looks = 1;; ++looks) {
    const bool rung = look_at_words(own, gate);
    if (!may_linger(own, gate)) return false;
    if (cleared || (!stands && has_call(gate))) return true;
    if (looks % 16 == 0 && __shfl_sync(kFull, nanoseconds() >= until_ns, 0)) return false;  // a slow clock
    if (!rung) continue;
    // The ringer may have stored before the words loaded here, or after them.
    if (lane_of() == 1) exchange_system(reinterpret_cast<std::uint64_t*>(own.calls.words->bell), 0);
    fence_system();
    __syncwarp();
    cleared = true;
  }
}

// Looks for the next call, as a gate does, until one is taken or the time is up. Hands the work to all CTAs
// that linger. The kernel is inside meanwhile, so the group view stays as it is. The first warp of the CTA
// that has concluded the call before (`before`) calls.
__device__ __noinline__ inline void linger(const WorkerArguments& own, Gate& gate, const Work& before) {
  __syncwarp();  // the call before is concluded
  enter(own, gate, before.lingering, 0);
  const std::uint64_t until_ns =
      min(nanoseconds() + std::uint64_t{gate.state.linger_us} * 1'000, before.linger_until_ns);
  const bool last = before.number + 1 - own.number == kWorksOfPair - 1;
  bool taken = false;
  for (bool goes_on = !last && may_linger_behind(own, gate, before); goes_on;) {
    Look look = Look::kNothing;
    if (lane_of() == 0) look = decide(own, gate);
    look = static_cast<Look>(__shfl_sync(kFull, static_cast<int>(look), 0));
    __syncwarp();
    keep(own, gate);
    taken = look == Look::kTaken;
    goes_on = !taken && await_call(own, gate, look == Look::kStands, until_ns);
  }
  if (lane_of() == 0) {
    gate.work.number = before.number + 1;
    gate.work.linger_until_ns = before.linger_until_ns;
    gate.work.credit = before.credit;
    if (!taken) end_lingering(own, gate, before);
  }
  // The view must stay meanwhile: if this CTA takes part, the operation can't end before it.
  const bool tells = taken && lane_of() == 0;
  const bool takes_part = blockIdx.x < gate.work.ctas;
  if (tells && !takes_part) tell_begun(own, gate);
  __syncwarp();
  hand_over(own, gate, before.number + 1);
  if (tells && takes_part) tell_begun(own, gate);
  fence_async();  // a bulk copy may write next where the gate was
}

// ---- composing a call's operation in a CTA's shared memory, by all its threads

// A CTA's copy of the group view, and of the work divisions of the last dispatch and of the last combine.
struct ViewCopy {
  alignas(16) std::uint8_t view[sizeof(DeviceView)];
  alignas(16) WorkDivision division[2];
  std::uint32_t division_at[2];
  bool begins;  // begin_call()

  __device__ const DeviceView& get() const { return *reinterpret_cast<const DeviceView*>(view); }
};

// Copies a struct from device memory into shared memory, by threads first, first + 1, ... of the CTA.
template <typename T>
__device__ inline void copy_by_threads(T* to, const T* from, std::uint32_t first) {
  static_assert(sizeof(T) % 16 == 0);
  const auto* const source = reinterpret_cast<const uint4*>(from);
  for (std::uint32_t i = threadIdx.x - first; i < sizeof(T) / 16; i += blockDim.x - first)
    reinterpret_cast<uint4*>(to)[i] = __ldcg(source + i);
}

// Copies what is known before the call, while the gate decides. All warps but the first call.
__device__ inline void copy_view(const WorkerArguments& own, ViewCopy& copy) {
  static_assert(sizeof(DeviceView) / 16 <= kMaxThreads - 32);
  const std::uint32_t kind = warp_of() - 1;
  if (kind < 2) {
    const std::uint32_t at = load_here(&own.lane->divisions[kind]);
    EPD_BELOW(at, kDivisionKinds * own.calls.most_ctas);
    if (lane_of() < sizeof(WorkDivision) / 16)
      reinterpret_cast<uint4*>(copy.division + kind)[lane_of()] =
          __ldcg(reinterpret_cast<const uint4*>(own.calls.division + at) + lane_of());
    if (lane_of() == 0) copy.division_at[kind] = at;
  }
  copy_by_threads(reinterpret_cast<DeviceView*>(copy.view), own.calls.view, 32);
}

// Copies a struct in shared memory, by the lanes of a warp.
template <typename T>
__device__ inline void copy_words(T& to, const T& from) {
  static_assert(sizeof(T) % 4 == 0);
  for (std::uint32_t i = lane_of(); i < sizeof(T) / 4; i += 32)
    reinterpret_cast<std::uint32_t*>(&to)[i] = reinterpret_cast<const std::uint32_t*>(&from)[i];
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
    case 7:
      copy_words(op.shape, view.group.shape);
      copy_words(op.inbox, view.group.inbox);
      __syncwarp();
      if (lane == 0) compose_constants(op, view.group, call);
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

// Composes the work's operation. All threads call. The view is in the copy, after a barrier. Returns whether
// the operation may be run.
__device__ inline bool compose_work(const WorkerArguments& own, const Work& work, ViewCopy& copy,
                                    Operation& op) {
  const TakenCall& call = work.call;
  // This fence orders earlier accesses before the bulk copies that the signal warp issues first (OwnRows).
  if (warp_of() == signal_warp()) fence_async();
  EPD_BELOW(call.block, own.calls.limits.depth);
  EPD_BELOW(call.slot, own.calls.limits.depth);
  EPD_BELOW(call.route, own.calls.limits.num_routes);
  EPD_BELOW(abi::format_of(call.flags), own.calls.limits.num_formats);
  const std::uint32_t kind = is_dispatch(call) ? 0 : 1;
  const std::uint32_t at = division_index(call, own.calls.most_ctas, work.ctas);
  EPD_BELOW(at, kDivisionKinds * own.calls.most_ctas);
  if (copy.division_at[kind] != at) {
    copy_by_threads(copy.division + kind, own.calls.division + at, 0);
    __syncthreads();
    if (threadIdx.x == 0) copy.division_at[kind] = at;
  }
  if (threadIdx.x == 8 * 32) copy.begins = begin_call(*own.lane, call);
  compose_by_warps(own.calls, call, copy.get(), copy.division[kind], op);
  __syncthreads();
  if (!has_flag(call, abi::kFlagPlaces)) return copy.begins;
  if (threadIdx.x == 0) take_own_places(op, load_places(*own.calls.words, call));
  __syncthreads();
  return copy.begins;
}

}  // namespace epd::kernels::cuda
