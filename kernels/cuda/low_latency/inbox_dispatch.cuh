// Low-latency dispatch. A row crosses NVLink once for each target rank, before its places are known. The
// receiver works out the places from all ranks' plan messages and scatters each row to its experts when it
// arrives.
#pragma once

#include "cuda/low_latency/sender.cuh"

namespace epd::kernels::cuda {

// Computes the places from all ranks' plan messages. The metadata warps of every CTA call. Returns false if
// the operation has failed.
__device__ inline bool find_places(const Shared& shared, const Team& metadata_team,
                                   const ReceivedPlans& plans, CtaBoard& board, std::uint64_t deadline_ns) {
  const bool good = plans.collect(metadata_team, deadline_ns) && plans.place(metadata_team, shared.ends);
  if (metadata_team.thread() == 0) {
    __threadfence_block();
    *static_cast<volatile std::uint32_t*>(&board.placed) = good ? CtaBoard::kKnown : CtaBoard::kFailed;
  }
  return good;
}

// Invalidates the routing record, and tells the other warps. The signal warp of CTA 0 calls. The others wait
// while they load choices, and find it done: a barrier would make them wait for the fence.
__device__ inline void invalidate_for_cta(const Operation& op, CtaBoard& board) {
  if (lane_of() == 0) {
    invalidate_record(op);
    *static_cast<volatile std::uint32_t*>(&board.invalidated) = 1;
  }
  __syncwarp();
}
// Waits until the record is invalid.
__device__ inline void wait_invalidated(const CtaBoard& board) {
  while (static_cast<const volatile std::uint32_t&>(board.invalidated) == 0) {
  }
  __threadfence_block();
}

// Stores the routing for later operations and delivers the counts. The metadata warps of CTA 0 call. Returns
// false if the operation has failed.
__device__ inline bool deliver_metadata(const Operation& op, const Shared& shared, const Team& metadata_team,
                                        const OwnChoices& own, const ReceivedPlans& plans) {
  if (op.cached) {
    deliver_counts(op, metadata_team);
  } else {
    std::int32_t* const words = plans.placement_words(cta_of(op));
    if (!plans.place_own(metadata_team, shared.base)) return false;
    plans.write_placement(metadata_team, shared, words);
    deliver_words(op, metadata_team, words, op.routing.placement);
    own.write_rows(metadata_team, shared.base);
  }
  if (metadata_team.warp() == metadata_team.warps - 1) {
    const std::uint32_t rows = plans.num_rows(shared.ends);
    if (lane_of() == 0) workspace(op).rows = rows;
  }
  return true;
}

// The work of all warps of a CTA but the signal warp. Returns false if the operation has failed.
__device__ inline bool dispatch_by_inbox(const Operation& op, const Shared& shared, CtaBoard& board,
                                         std::uint64_t* x_arrived, std::uint64_t deadline_ns) {
  const Team all = all_but_last();
  const Team fillers{op.division.warps, signal_warp() - op.division.warps};
  const Team metadata_team = blockIdx.x == 0 && op.division.ctas > 1 ? all : fillers;
  const bool copies = warp_of() < metadata_team.first_warp;
  const OwnChoices own(op, shared);
  const ReceivedPlans plans(op, cta_of(op), shared, board);
  const OwnRows rows(op, shared, board);
  LowLatencySender sender(op, shared, own, rows, board, x_arrived);
  const bool waits = must_wait_for_begins(op);
  const auto meanwhile = [&] {
    if (copies) sender.load(0);
    if (blockIdx.x == 0) wait_invalidated(board);
  };
  bool good = all.all(own.read(all, meanwhile));
  if (good && waits) good = wait_begins_together(op, board, deadline_ns);
  if (!good) {
    if (copies) sender.abandon();
    return false;
  }
  if (copies) {
#pragma unroll 1
    for (std::uint32_t first = 0; !sender.send(first);) sender.load(first);
    return sender.scatter(plans, deadline_ns);
  }
  if (blockIdx.x == 0) own.send_plan(metadata_team);
  if (!find_places(shared, metadata_team, plans, board, deadline_ns)) return false;
  if (blockIdx.x == 0 && !deliver_metadata(op, shared, metadata_team, own, plans)) return false;
  if (warp_of() >= op.division.warps) fill_rows(op, cta_of(op), shared, fillers);
  return true;
}

// Runs one CTA's part of a low-latency dispatch.
__device__ __noinline__ inline void run_low_latency_dispatch(const Operation& given, std::uint8_t* memory) {
  __shared__ CtaBoard cta_board;
  __shared__ std::uint64_t x_arrived;
  const Operation& op = by_register(given);
  CtaBoard& board = by_register(cta_board);
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(op, memory);
  if (warp_of() == signal_warp()) {
    if (lane_of() == 0) barrier_init(&x_arrived);
    fence_async_shared();
    __syncwarp();
    const OwnRows rows(op, shared, board);
    rows.count_rows();
    rows.load_round(0, &x_arrived);
  } else {
    if (threadIdx.x < op.shape.num_ranks) shared.targets[threadIdx.x] = op.peers[threadIdx.x].target;
    clear_board(board);
    OwnChoices(op, shared).clear(all_but_last());
  }
  __syncthreads();
  bool good = true;
  if (warp_of() != signal_warp()) {
    good = dispatch_by_inbox(op, shared, board, &x_arrived, deadline_ns);
  } else if (blockIdx.x == 0) {
    invalidate_for_cta(op, board);
    begin_and_announce(op);
    good = run_signal_warp(op, cta_of(op), board, op.division.ctas > 1 ? 0 : op.division.warps, deadline_ns);
  } else {
    good = signal_others(op, cta_of(op), board, op.division.warps);
  }
  good = __syncthreads_or(!good) == 0;
  if (threadIdx.x == 0) barrier_invalidate(&x_arrived);
  if (!good) return;
  const auto count_rows = [&op] { return __ldcg(&workspace(op).rows); };
  finish(op, cta_of(op), deadline_ns, count_rows, true);
}

}  // namespace epd::kernels::cuda
