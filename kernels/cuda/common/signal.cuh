// How CTAs and ranks synchronise: counters, signals, and waits with a deadline.
#pragma once

#include "cuda/common/ending.h"
#include "cuda/common/layout.h"
#include "cuda/common/ptx.cuh"
#include "kernels/row_places.h"

namespace epd::kernels::cuda {

// One of the CTAs that run an operation.
struct Cta {
  std::uint32_t index;
  std::uint32_t count;
};

__device__ inline Cta cta_of(const Operation& op) {
  return {blockIdx.x, op.division.ctas};
}

// The hardware barriers of a CTA, by name. Teams that may wait at the same time use different ones. Barrier 0
// belongs to __syncthreads().
enum class NamedBarrier : std::uint32_t { kMetadata = 1, kCopy = 2, kAllButSignal = 3 };

// Consecutive warps of a CTA that do something together.
struct Team {
  std::uint32_t first_warp;
  std::uint32_t warps;
  NamedBarrier barrier = NamedBarrier::kMetadata;

  __device__ std::uint32_t thread() const { return threadIdx.x - first_warp * 32; }
  __device__ std::uint32_t threads() const { return warps * 32; }
  __device__ std::uint32_t warp() const { return warp_of() - first_warp; }
  __device__ std::uint32_t number() const { return static_cast<std::uint32_t>(barrier); }
  __device__ void sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(number()), "r"(threads()) : "memory");
  }
  // Returns whether `mine` is true for all threads of the team. All of them call; it is a barrier.
  __device__ bool all(bool mine) const {
    std::uint32_t result;
    asm volatile(
        "{ .reg .pred p, q;\n"
        "  setp.ne.u32 p, %1, 0;\n"
        "  bar.red.and.pred q, %3, %2, p;\n"
        "  selp.u32 %0, 1, 0, q; }"
        : "=r"(result)
        : "r"(static_cast<std::uint32_t>(mine)), "r"(threads()), "r"(number())
        : "memory");
    return result != 0;
  }
};
__device__ inline Team whole_cta() {
  return {0, blockDim.x / 32};
}

// The number of the signal warp, the last warp of every CTA. It copies no rows.
__device__ inline std::uint32_t signal_warp() {
  return blockDim.x / 32 - 1;
}
__device__ inline Team all_but_last() {
  return {0, signal_warp(), NamedBarrier::kAllButSignal};
}

// The counts of what this rank sends: [R], then [E]. They are zero between operations.
__device__ inline std::uint32_t* totals(const Operation& op) {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(op.workspace) + kWorkspaceHead);
}
// The counts of what each CTA's tokens send: [CTA][targets].
__device__ inline std::uint32_t* cta_counts(const Operation& op) {
  return totals(op) + op.shape.num_ranks + op.shape.num_experts;
}
__device__ inline std::uint32_t num_targets(const Shape& shape) {
  return shape.per_expert ? shape.num_experts : shape.num_ranks;
}
__device__ inline std::uint32_t experts_per_rank(const Shape& shape) {
  return shape.experts_per_rank;
}
// Returns whether the rank takes part in the current epoch.
__device__ inline bool is_active(const Operation& op, std::uint32_t rank) {
  return op.peers[rank].ready != nullptr;
}

// Publishes the routing that a dispatch has made: stores the record's head, and the handle after a fence.
// One thread calls.
__device__ inline void publish_routing(const Operation& op, const OpResult& ending) {
  abi::RoutingRecord& head = *op.routing.head;
  head.epoch = op.routing.epoch;
  head.num_tokens = op.num_tokens;
  head.num_recv_rows = ending.num_recv_rows;
  head.num_dropped = ending.num_dropped;
  fence_system();
  store_relaxed_system(&head.handle, op.routing.handle);
}

// The pause between two polls where many warps of each SM poll. Without a pause, their polls delay the data
// from other ranks (kernels/CUDA_KERNELS.md).
inline constexpr std::uint32_t kManyPauseNs = 300;

// Polls until reached() is true for each lane with `waits`. `rank` is the rank that the lane waits for.
// Returns false if the operation has failed. All lanes of a warp call.
template <std::uint32_t kPauseNs = 0, typename Reached>
__device__ inline bool wait_until(const Operation& op, std::uint32_t rank, bool waits,
                                  std::uint64_t deadline_ns, Reached reached) {
#pragma unroll 1
  for (std::uint32_t polls = 1;; ++polls) {
    if (waits) waits = !reached();
    if (__all_sync(kFull, !waits)) return true;
    if (kPauseNs != 0) __nanosleep(kPauseNs);
    if (polls % 64 != 0) continue;
    if (waits) EPD_BELOW(rank, op.shape.num_ranks);
    const std::uint32_t waiting = __reduce_or_sync(kFull, waits ? 1u << rank : 0u);
    bool leave = false;
    if (lane_of() == 0) leave = must_leave(op, deadline_ns, waiting);
    if (__shfl_sync(kFull, leave, 0)) return false;
  }
}

// Waits until the word of each lane with `mine` has reached the operation's tag. `rank` is the rank that the
// lane waits for. Afterwards everything that was released with the words is visible to the calling lane.
// Returns false if the operation has failed. All lanes of a warp call.
template <std::uint32_t kPauseNs = 0>
__device__ inline bool wait_words(const Operation& op, const std::uint64_t* word, bool mine,
                                  std::uint32_t rank, std::uint64_t deadline_ns) {
  const bool missing = mine && load_acquire_system(word) < op.tag;
  if (__any_sync(kFull, missing)) {
    // These polls are relaxed. Acquiring polls would delay the loads of all warps of the SM.
    const auto reached = [&] { return load_relaxed_system(word) >= op.tag; };
    if (!wait_until<kPauseNs>(op, rank, missing, deadline_ns, reached)) return false;
    if (missing) load_acquire_system(word);  // not a fence: a fence would wait for the warp's stores
  }
  __syncwarp();
  return true;
}

// Waits until this rank's own `lines` (ready or arrived) have reached the operation's tag for all ranks in
// the set `ranks`. All threads of the CTA call. Afterwards everything that those ranks released is visible to
// each thread. Returns false if the operation has failed.
__device__ inline bool wait_signals(const Operation& op, const abi::SignalLine* lines, std::uint32_t ranks,
                                    std::uint64_t deadline_ns) {
  bool leave = false;
  if (warp_of() == 0) {
    std::uint32_t waiting = ranks;
#pragma unroll 1
    for (std::uint32_t polls = 1; waiting != 0; ++polls) {
      const bool mine = ((waiting >> lane_of()) & 1) != 0;
      const bool reached = mine && load_acquire_system(&lines[lane_of()].tag) >= op.tag;
      waiting &= ~__ballot_sync(kFull, reached);
      if (waiting == 0 || polls % 64 != 0) continue;
      if (lane_of() == 0) leave = must_leave(op, deadline_ns, waiting);
      leave = __shfl_sync(kFull, leave, 0);
      if (leave) break;
    }
  }
  return __syncthreads_or(leave) == 0;
}

// The state of the operation that a CTA leaves.
struct Leaving {
  bool last;    // this CTA is the last one to leave
  bool failed;  // the operation has failed; known to the last CTA only
};

// The last step of each CTA, whether the operation has failed or not. All threads call. After a failure, the
// last of the `ctas` CTAs clears the workspace, so that the next operation can begin.
__device__ inline Leaving leave(const Operation& op, std::uint32_t ctas) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(&workspace(op).leaving, ctas - 1) == ctas - 1;
  __syncthreads();
  if (!last) return {false, false};
  const bool failed = load_relaxed(&workspace(op).failed) == op.tag;
  __syncthreads();
  if (!failed) return {true, false};
  EPD_BELOW(kWorkspaceHead, op.workspace_bytes);
  auto* const words = static_cast<std::uint32_t*>(op.workspace);
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < op.workspace_bytes / 4; i += blockDim.x) words[i] = 0;
  __syncthreads();
  if (threadIdx.x == 0) end_failed(op);
  return {true, true};
}

// Returns the set of active ranks. All lanes of a warp call.
__device__ inline std::uint32_t active_ranks(const Operation& op) {
  const bool active = lane_of() < op.shape.num_ranks && is_active(op, lane_of());
  return __ballot_sync(kFull, active);
}

// Writes this rank's announcement into the block of `rank`. A fence and the signal `ready` must follow.
__device__ inline void write_announcement(const Operation& op, std::uint32_t rank) {
  const auto* const from = reinterpret_cast<const std::uint64_t*>(&op.announcement);
  auto* const to = reinterpret_cast<std::uint64_t*>(op.peers[rank].announcement + op.rank);
#pragma unroll 1
  for (std::uint32_t i = 0; i < sizeof(op.announcement) / sizeof(*to); ++i) to[i] = from[i];
}
// Signals `ready` to `rank`.
__device__ inline void signal_ready(const Operation& op, std::uint32_t rank) {
  store_relaxed_system(&op.peers[rank].ready[op.rank].tag, op.tag);
}
// Announces the operation to every rank. Threads of this CTA have stored the counts before. All threads call.
__device__ inline void announce(const Operation& op) {
  __syncthreads();
  const std::uint32_t rank = threadIdx.x;
  if (rank >= op.shape.num_ranks || !is_active(op, rank)) return;
  write_announcement(op, rank);
  fence_system();
  signal_ready(op, rank);
}

// Reads the operation, its slot and its row format in one access.
__device__ inline std::uint64_t op_slot_and_format(const abi::OpAnnouncement& announcement) {
  return *reinterpret_cast<const std::uint64_t*>(&announcement.op);
}
// Returns whether a ready rank has announced the same operation. If not, the operation fails.
__device__ inline bool agrees(const Operation& op, std::uint32_t rank) {
  EPD_BELOW(rank, op.shape.num_ranks);
  const abi::OpAnnouncement& own = op.announcement;
  const abi::OpAnnouncement& theirs = op.peers[op.rank].announcement[rank];
  if (op_slot_and_format(theirs) == op_slot_and_format(own) && abi::same_routing(theirs.routing, own.routing))
    return true;
  fail(op, ended(OpError::kMismatch, static_cast<std::int32_t>(rank)));
  return false;
}

// Returns whether all ranks run the same operation. Takes the places that they have announced. All threads
// call, after wait_signals().
__device__ inline bool check_announcements(Operation& op) {
  const std::uint32_t rank = threadIdx.x;
  const bool active = rank < op.shape.num_ranks && is_active(op, rank);
  const bool good = !active || agrees(op, rank);
  if (active && good && rank != op.rank && op.memories != nullptr)
    take_place(op, rank, op.peers[op.rank].announcement[rank].place, op.peers[rank]);
  return __syncthreads_and(good) != 0;
}

// Publishes that this rank's rows have left. The rows are stored elsewhere by now, so nothing needs a fence.
__device__ inline void publish_sent(const Operation& op) {
  if (op.counts.host_sent != nullptr) store_relaxed_system(op.counts.host_sent, op.counts.mark);
}

// Adds to workspace().dropped the selections of this rank's tokens whose rank has no rows of the routing.
// Such a rank left or joined after the dispatch. Combine only; all threads of a CTA call. The choices are
// read only if there is such a rank.
__device__ __noinline__ inline void count_lost(const Operation& op) {
  const std::uint32_t experts = op.shape.num_experts / op.shape.num_ranks;
  const auto lost = [&](std::uint32_t rank) { return op.peers[rank].source.y == nullptr; };
  if (!__syncthreads_or(threadIdx.x < op.shape.num_ranks && lost(threadIdx.x))) return;
  std::uint32_t count = 0;
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < op.num_tokens * op.shape.topk; i += blockDim.x) {
    const std::int32_t choice = __ldcg(op.routing.topk + i);
    if (choice >= 0 && lost(static_cast<std::uint32_t>(choice) / experts)) ++count;
  }
  if (count != 0) add(&workspace(op).dropped, count);
  __syncthreads();
}

// Ends the operation. All threads of each CTA call when the CTA's rows are stored (or pulled) and visible to
// the calling threads. The last CTA signals `arrived` to every rank and waits for every rank's signal. Then
// it publishes the routing record's head (only a dispatch that makes a routing), and then the result.
// `signaled`: the ranks have already exchanged these signals. `count_rows()` returns M; one thread calls it.
// `deadline_ns` is op.timeout_ns after the CTA's begin.
template <bool kCombine = false, typename CountRows>
__device__ inline void finish(const Operation& op, Cta cta, std::uint64_t deadline_ns, CountRows count_rows,
                              bool signaled = false) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (!signaled) fence_system();
    last = count_up(&workspace(op).finished, cta.count - 1) == cta.count - 1;
    if (last && signaled) unblock_stream(op);  // at once, because a client waits for it
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) workspace(op).claimed = 0;
  if (!signaled) {
    if (threadIdx.x < op.shape.num_ranks && is_active(op, threadIdx.x))
      store_release_system(&op.peers[threadIdx.x].arrived[op.rank].tag, op.tag);
    if (threadIdx.x == 0) publish_sent(op);
    if (!wait_signals(op, op.peers[op.rank].arrived, active_ranks(op), deadline_ns)) return;
  }
  if (threadIdx.x == 0 && !signaled) unblock_stream(op);
  const bool uses = op.routing.record != nullptr;
  if (kCombine && uses) count_lost(op);
  if (threadIdx.x != 0) return;
  workspace(op).ended = op.tag;
  if (signaled) {
    store_relaxed_system(&op.peers[op.rank].arrived[op.rank].tag, op.tag);
    publish_sent(op);
  }
  OpResult ending = ended(OpError::kNone, -1);
  ending.num_recv_rows = count_rows();
  ending.num_dropped = load_here(&workspace(op).dropped) + (uses ? op.routing.record->num_dropped : 0);
  workspace(op).dropped = 0;
  ending.ran_ns = nanoseconds() - (deadline_ns - op.timeout_ns);
  if (op.routing.head != nullptr) publish_routing(op, ending);
  publish(op, ending);
}

// Returns the sum over lanes 0 to the caller's own lane.
__device__ inline std::uint32_t sum_lanes_up_to(std::uint32_t value) {
#pragma unroll 1
  for (std::uint32_t step = 1; step < 32; step *= 2) {
    const std::uint32_t lower = __shfl_up_sync(kFull, value, step);
    if (lane_of() >= step) value += lower;
  }
  return value;
}

// Part `index` of `parts` equal parts of `count` items, as [begin, end). Tokens times CTAs (or warps) must
// fit in 32 bits.
struct Range {
  std::uint32_t begin;
  std::uint32_t end;
};
__device__ inline Range part_of(std::uint32_t count, std::uint32_t index, std::uint32_t parts) {
  return {count * index / parts, count * (index + 1) / parts};
}
// Returns the part that contains item `item`.
__device__ inline std::uint32_t part_with(std::uint32_t count, std::uint32_t item, std::uint32_t parts) {
  return ((item + 1) * parts - 1) / count;
}

}  // namespace epd::kernels::cuda
