// Dispatch through landings: a row crosses the wire once for each rank, before its places are known; the
// receiver works them out from everybody's plans and spreads the row over its experts' rows as it lands.
#pragma once

#include "cuda/low_latency/sender.cuh"

namespace epd::kernels::cuda {

// The clerks' part of every CTA: places, from everybody's plans. False: failed.
__device__ inline bool find_places(const Shared& shared, const Team& clerks, const LandedPlans& plans,
                                   LandingBoard& board, std::uint64_t deadline_ns) {
  const bool good = plans.collect(clerks, deadline_ns) && plans.place(clerks, shared.ends);
  if (clerks.thread() == 0) {
    __threadfence_block();
    *static_cast<volatile std::uint32_t*>(&board.placed) =
        good ? LandingBoard::kKnown : LandingBoard::kNowhere;
  }
  return good;
}

// CTA 0: what a routing leaves for later operations, and the counts. False: failed.
__device__ inline bool keep_landing_books(const Operation& op, const Shared& shared, const Team& clerks,
                                          const OwnChoices& own, const LandedPlans& plans) {
  if (op.cached) {
    deliver_counts(op, clerks);
  } else {
    std::int32_t* const words = plans.placement_words(cta_of(op));
    if (!plans.place_own(clerks, shared.base)) return false;
    plans.write_placement(clerks, shared, words);
    deliver_words(op, clerks, words, op.routing.placement);
    own.write_rows(clerks, shared.base);
  }
  if (clerks.warp() == clerks.warps - 1) {
    const std::uint32_t rows = plans.num_rows(shared.ends);
    if (lane_of() == 0) workspace(op).rows = rows;
  }
  return true;
}

// All warps of a CTA but the last.
__device__ inline bool dispatch_landing(const Operation& op, const Shared& shared, LandingBoard& board,
                                        std::uint64_t* x_there, std::uint64_t deadline_ns) {
  const Team all = all_but_last();
  const Team fillers{op.movers.warps, herald_warp() - op.movers.warps};
  const Team clerks = blockIdx.x == 0 && op.movers.ctas > 1 ? all : fillers;
  const bool moves = warp_of() < clerks.first_warp;
  const OwnChoices own(op, shared);
  const LandedPlans plans(op, cta_of(op), shared, board);
  const OwnRows rows(op, shared);
  Carrier carrier(op, shared, own, rows, board, x_there);
  const bool asks = asks_before_landing(op);
  const auto meanwhile = [&] {
    if (moves) carrier.load(0);
  };
  bool good = all.all(own.read(all, meanwhile));
  if (good && asks) good = greet_together(op, board, deadline_ns);
  if (!good) {
    if (moves) carrier.abandon();
    return false;
  }
  if (moves) {
#pragma unroll 1
    for (std::uint32_t first = 0; !carrier.send(first);) carrier.load(first);
    return carrier.spread(plans, deadline_ns);
  }
  if (blockIdx.x == 0) own.tell_plan(clerks);
  if (!find_places(shared, clerks, plans, board, deadline_ns)) return false;
  if (blockIdx.x == 0 && !keep_landing_books(op, shared, clerks, own, plans)) return false;
  if (warp_of() >= op.movers.warps) fill_rows(op, cta_of(op), shared, fillers);
  return true;
}

// One CTA's part of a dispatch through landings.
__device__ __noinline__ inline void run_landing_dispatch(const Operation& given, std::uint8_t* memory) {
  __shared__ LandingBoard the_board;
  __shared__ std::uint64_t x_there;
  const Operation& op = held(given);
  LandingBoard& board = held(the_board);
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(op, memory);
  if (blockIdx.x == 0) open_routing(op);  // nobody else writes it
  if (warp_of() == herald_warp()) {
    if (lane_of() == 0) barrier_init(&x_there);
    fence_async_shared();
    __syncwarp();
    OwnRows(op, shared).load_round(0, &x_there);
  } else {
    if (threadIdx.x < op.shape.num_ranks) shared.targets[threadIdx.x] = op.peers[threadIdx.x].target;
    clear_board(board);
    OwnChoices(op, shared).clear(all_but_last());
  }
  __syncthreads();
  bool good = true;
  if (warp_of() != herald_warp()) {
    good = dispatch_landing(op, shared, board, &x_there, deadline_ns);
  } else if (blockIdx.x == 0) {
    say_hello(op);
    good = herald(op, cta_of(op), board, op.movers.ctas > 1 ? 0 : op.movers.warps, deadline_ns);
  } else {
    good = tell_others(op, cta_of(op), board, op.movers.warps);
  }
  good = __syncthreads_or(!good) == 0;
  if (threadIdx.x == 0) barrier_invalidate(&x_there);
  if (!good) return;
  const auto count_rows = [&op] { return __ldcg(&workspace(op).rows); };
  finish(op, cta_of(op), deadline_ns, count_rows, true);
}

}  // namespace epd::kernels::cuda
