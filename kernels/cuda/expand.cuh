// Dispatch through landings: a row crosses the wire once for each rank, before its places are known; the
// receiver spreads it over its experts' rows when it has landed and everybody's counts are there.
#pragma once

#include "cuda/dispatch.cuh"
#include "cuda/landing.cuh"

namespace epd::kernels::cuda {

// What a CTA's warps tell each other during a dispatch through landings; zero before.
struct ExpandBoard {
  std::uint32_t sent;     // warps that have sent their rows
  std::uint32_t claimed;  // landed rows that warps have taken
  std::uint32_t placed;   // kPlaced: the places are known; kFailed: the operation has failed
  static constexpr std::uint32_t kPlaced = 1;
  static constexpr std::uint32_t kFailed = 2;
};

// Where the rows of every source begin at each expert of this rank, and how many they are: [R,E/R] each, in
// the memory of the counters.
struct SourceRows {
  std::uint32_t* first;
  std::uint32_t* count;
  __device__ SourceRows(const Operation& op, const Shared& shared)
      : first(shared.scratch), count(shared.scratch + op.shape.num_experts) {}
};

// ---- CTA 0: this rank's choices, for everybody

// Choices, numbers and weights to every rank, after the counts. All threads of a CTA call.
__device__ inline void tell_choices(const Operation& op) {
  const std::uint32_t count = op.num_tokens * op.shape.topk;
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const std::int32_t expert = __ldcg(op.routing.topk + i);
    const std::int32_t row = __ldcg(op.routing.rows + i);
    const float weight = op.topk_weights == nullptr ? 0.0f : __ldcg(op.topk_weights + i);
    std::uint32_t number = kNoNumber;
    if (row < -1) number = -2 - row;
    if (row >= 0) number = row - __ldcg(op.routing.placement + expert);  // a known routing: base comes first
    const std::int32_t what = expert < 0 ? -1 : static_cast<std::int32_t>(expert << 16 | number);
    for (std::uint32_t d = 0; d < op.shape.num_ranks; ++d) {
      if (is_there(op, d)) tell(told_choices(op, d, op.rank, 0) + i, {what, weight});
    }
  }
  __syncthreads();
  if (threadIdx.x >= op.shape.num_ranks || !is_there(op, threadIdx.x)) return;
  fence_system();
  store_release_system(counted_line(op, threadIdx.x, op.rank), op.tag);
}

// Until all ranks are ready and known to do the same. False: failed.
__device__ inline bool wait_ready(const Operation& op, std::uint64_t deadline_ns) {
  return wait_signals(op, op.peers[op.rank].ready, ranks_there(op), deadline_ns) && check_announcements(op);
}

__device__ inline bool tell_routing(const Operation& op, const Shared& shared, std::uint64_t deadline_ns) {
  if (!op.cached) {
    number_rows(op, {0, 1}, Counters(op, shared));
    __syncthreads();
    if (!check_choices(op)) return false;
    if (threadIdx.x == 0) {
      fence_system();
      store_release_system(&workspace(op).chosen, op.tag);
    }
  }
  if (!wait_ready(op, deadline_ns)) return false;
  if (!op.cached) send_counts(op);
  tell_choices(op);
  return true;
}

// ---- places

// By a team of each CTA, from everybody's counts or from a known routing. False: failed.
__device__ inline bool place_sources(const Operation& op, const Shared& shared, const Team& team) {
  const SourceRows rows(op, shared);
  const std::uint32_t experts = experts_per_rank(op.shape);
  if (op.cached) {
    const PlacementSections at(op.shape);
    const std::int32_t* const words = op.routing.placement;
    for (std::uint32_t i = team.thread(); i < op.shape.num_experts; i += team.threads()) {
      const std::uint32_t source = i / experts;
      const std::uint32_t range = at.source_ranges + (i % experts * op.shape.num_ranks + source) * 2;
      rows.first[i] = __ldcg(words + range);
      rows.count[i] = __ldcg(words + range + 1);
    }
    for (std::uint32_t i = team.thread(); i < experts; i += team.threads()) {
      const std::int32_t first = __ldcg(words + at.expert_offsets + i);
      shared.ends[i * 2] = first + __ldcg(words + at.expert_counts + i);
      shared.ends[i * 2 + 1] = __ldcg(words + at.expert_offsets + i + 1);
    }
    return team.all(true);
  }
  for (std::uint32_t e = team.thread(); e < op.shape.num_experts; e += team.threads()) shared.base[e] = 0;
  team.sync();
  if (!place_rows(op, shared, team)) return false;
  for (std::uint32_t i = team.thread(); i < op.shape.num_experts; i += team.threads()) {
    const std::uint32_t source = i / experts;
    const std::uint32_t expert = op.rank * experts + i % experts;
    const ColumnSum sum = expert_column(op, expert, source);
    const std::uint32_t* const counts = op.peers[op.rank].expert_counts + source * op.shape.num_experts;
    rows.first[i] = shared.ends[i % experts * 2] - sum.total + sum.below;
    rows.count[i] = is_there(op, source) ? __ldcg(counts + expert) : 0;
  }
  return team.all(true);
}

// The clerks' way to the places; then the movers may go on. False: failed.
__device__ inline bool find_places(const Operation& op, const Shared& shared, const Team& clerks,
                                   ExpandBoard& board, std::uint64_t deadline_ns) {
  bool good = true;
  if (clerks.warp() == 0) {
    const bool mine = lane_of() < op.shape.num_ranks && is_there(op, lane_of());
    const std::uint32_t source = mine ? lane_of() : op.rank;
    good = wait_words(op, counted_line(op, op.rank, source), mine, source, deadline_ns);
  }
  good = clerks.all(good) && place_sources(op, shared, clerks);
  if (clerks.thread() == 0) {
    __threadfence_block();
    *static_cast<volatile std::uint32_t*>(&board.placed) = good ? ExpandBoard::kPlaced : ExpandBoard::kFailed;
  }
  return good;
}

// ---- the movers

// One warp's part: it sends rows of this rank's tokens, then spreads what has landed.
class Carrier {
 public:
  // CTA 0 has the choices to tell and sends no rows, if there are others.
  __device__ Carrier(const Operation& op, Cta cta, const Shared& shared, ExpandBoard& board)
      : op_(op),
        cta_(cta),
        shared_(shared),
        board_(board),
        stages_(op, shared),
        stage_(op.shape.format, stages_.at(0)),
        moves_(warp_of() < op.movers.warps) {
    const std::uint32_t senders = cta.count == 1 ? 1 : cta.count - 1;
    const std::uint32_t index = cta.count == 1 ? 0 : cta.index - 1;  // of CTA 0: beyond all tokens
    step_ = senders * op.movers.warps;
    token_ = cta.count > 1 && cta.index == 0 ? op.num_tokens : index + senders * warp_of();
    if (!moves_) token_ = op.num_tokens;
  }
  __device__ bool moves() const { return moves_; }

  __device__ void begin() {
    if (!moves_) return;
    stages_.open();
    load(token_);
  }
  // The first row gets its form while others are waited for.
  __device__ void prepare() {
    if (token_ >= op_.num_tokens) return;
    take();
    prepared_ = true;
  }

  // Returns when all is released.
  __device__ void send() {
    while (token_ < op_.num_tokens) {
      if (!prepared_) take();
      prepared_ = false;
      send_one();
      token_ += step_;
      load(token_);
    }
    tell_others(op_, cta_, board_.sent, op_.movers.warps);
  }

  // Spreads landed rows, as warps get free. False: the operation has failed.
  __device__ bool spread(std::uint64_t deadline_ns) {
    if (!wait_places()) return leave(false);
    const std::uint32_t tokens = announced_tokens(op_);  // of source `lane`
    const std::uint32_t most = __reduce_max_sync(kFull, tokens);
    const std::uint32_t ranks = op_.shape.num_ranks;
    for (std::uint32_t i = claim(); i < most * ranks; i = claim()) {
      const std::uint32_t source = (i + op_.rank) % ranks;
      if (i / ranks >= __shfl_sync(kFull, tokens, static_cast<int>(source))) continue;
      if (!spread_one(source, i / ranks, deadline_ns)) return leave(false);
    }
    return leave(true);
  }

  // The operation has failed: nothing may be on its way into this CTA's memory when it leaves.
  __device__ void abandon() {
    if (!moves_) return;
    if (token_ < op_.num_tokens && !prepared_) barrier_wait(stages_.barriers, parity_);
    stages_.close();
  }

 private:
  __device__ void load(std::uint32_t token) {
    if (token < op_.num_tokens) load_row(op_, stage_, stages_.barriers, token);
  }
  // The row as it leaves.
  __device__ void take() {
    wait_loaded();
    if (op_.shape.format.cast) cast_row(stage_.x, stage_.row, stage_.scales, op_.shape.format);
    fence_async_shared();
    __syncwarp();
  }
  __device__ void wait_loaded() {
    barrier_wait(stages_.barriers, parity_);
    parity_ ^= 1;
    __syncwarp();
  }

  // To every rank that the token has chosen.
  __device__ void send_one() {
    std::int32_t expert = -1;
    if (lane_of() < op_.shape.topk) expert = __ldcg(op_.routing.topk + token_ * op_.shape.topk + lane_of());
    const std::uint32_t rank = expert < 0 ? 0 : expert / experts_per_rank(op_.shape);
    const std::uint32_t ranks = __reduce_or_sync(kFull, expert < 0 ? 0u : 1u << rank);
    const bool mine = ((ranks >> lane_of()) & 1) != 0;
    const std::uint32_t to = mine ? lane_of() : op_.rank;
    warp_store(landing_slot(op_, to, op_.rank, token_), stage_.row, slot_bytes(), mine);
    stores_commit();
    stores_wait_done();
    if (mine) store_release_system(landed_tag(op_, to, op_.rank, token_, 0), op_.tag);
    fence_async_shared();
    __syncwarp();
  }
  // Of a row with its scales.
  __device__ std::uint32_t slot_bytes() const {
    const RowFormat& format = op_.shape.format;
    return (format.row_bytes + format.scale_bytes + 15) / 16 * 16;
  }

  __device__ bool wait_places() const {
    const volatile std::uint32_t* const placed = &board_.placed;
    while (*placed == 0) {
    }
    __threadfence_block();
    __syncwarp();
    return *placed == ExpandBoard::kPlaced;
  }
  // A landed row of this CTA's share.
  __device__ std::uint32_t claim() const {
    std::uint32_t next = 0;
    if (lane_of() == 0) next = atomicAdd(&board_.claimed, 1);
    return cta_.index + cta_.count * __shfl_sync(kFull, next, 0);
  }

  __device__ bool spread_one(std::uint32_t source, std::uint32_t token, std::uint64_t deadline_ns) {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    ToldChoice told{-1, 0.0f};
    if (lane_of() < op_.shape.topk) told = read_told(told_choices(op_, op_.rank, source, token) + lane_of());
    const std::uint32_t expert = told.what < 0 ? kFull : static_cast<std::uint32_t>(told.what) >> 16;
    const std::uint32_t local = expert - op_.rank * experts;
    const float weight = sum_weights(op_.shape.topk, expert, told.weight);
    const SourceRows rows(op_, shared_);
    TokenChoice place;
    place.rank = op_.rank;
    if (told.what >= 0 && local < experts) {
      const std::uint32_t number = told.what & 0xffff;
      if (number < rows.count[source * experts + local])
        place.row = static_cast<std::int32_t>(rows.first[source * experts + local] + number);
    }
    if (__ballot_sync(kFull, place.row >= 0) == 0) return true;
    if (place.row >= 0) {
      const DispatchTarget& own = shared_.targets[op_.rank];
      store_index(op_, own.recv_topk_idx, place.row, static_cast<std::int32_t>(local));
      own.recv_topk_weights[place.row] = weight;
      reinterpret_cast<int2*>(own.recv_src)[place.row] = {static_cast<int>(source), static_cast<int>(token)};
    }
    if (!wait_words(op_, landed_tag(op_, op_.rank, source, token, 0), lane_of() == 0, source, deadline_ns))
      return false;
    stores_wait_read();
    fence_async();
    __syncwarp();
    if (lane_of() == 0) barrier_expect(stages_.barriers, slot_bytes());
    warp_load(stage_.row, landing_slot(op_, op_.rank, source, token), slot_bytes(), lane_of() == 0,
              stages_.barriers);
    wait_loaded();
    fence_async_shared();
    __syncwarp();
    send_row(op_, shared_, stage_, place);
    return true;
  }
  __device__ bool leave(bool good) const {
    stores_wait_done();
    stages_.close();
    return good;
  }

  const Operation& op_;
  const Cta cta_;
  const Shared& shared_;
  ExpandBoard& board_;
  const Stages stages_;
  const StageLayout stage_;
  const bool moves_;
  bool prepared_ = false;
  std::uint32_t parity_ = 0;
  std::uint32_t token_;
  std::uint32_t step_;
};

// Places of this rank's own rows, kept for later operations.
__device__ inline void keep_places(const Operation& op, const Shared& shared, const Team& team) {
  const std::uint32_t count = op.num_tokens * op.shape.topk;
  for (std::uint32_t i = team.thread(); i < count; i += team.threads()) {
    const std::int32_t row = op.routing.rows[i];
    if (row < -1) op.routing.rows[i] = static_cast<std::int32_t>(shared.base[op.routing.topk[i]]) - 2 - row;
  }
}

// One CTA's part of a dispatch through landings.
__device__ inline void run_landing_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  __shared__ ExpandBoard board;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(Kind::kDispatch, op, memory);
  if (threadIdx.x == 0) board = {};
  if (threadIdx.x < op.shape.num_ranks) shared.targets[threadIdx.x] = op.peers[threadIdx.x].target;
  if (cta.index == 0) announce(op);
  Carrier carrier(op, cta, shared, board);
  carrier.begin();
  bool good = true;
  if (cta.index == 0) good = tell_routing(op, shared, deadline_ns);
  if (good && cta.index != 0) {
    carrier.prepare();
    good = wait_ready(op, deadline_ns);
    if (good && !op.cached && warp_of() < op.movers.warps)
      good = wait_words(op, &workspace(op).chosen, lane_of() == 0, op.rank, deadline_ns);
  }
  if (__syncthreads_or(!good) != 0) {
    carrier.abandon();
    return;
  }
  if (carrier.moves()) {
    carrier.send();
    good = carrier.spread(deadline_ns);
  } else {
    const Team clerks{op.movers.warps, blockDim.x / 32 - op.movers.warps};
    good = find_places(op, shared, clerks, board, deadline_ns);
    if (good && cta.index == 0) {
      if (!op.cached) {
        keep_places(op, shared, clerks);
        record_placement(op, shared, clerks);
      }
      deliver_counts(op, clerks);
    }
    if (good) fill_rows(op, cta, shared, clerks);
  }
  if (__syncthreads_or(!good) != 0) return;
  finish(
      op, cta, deadline_ns, [&op] { return num_recv_rows(op); }, true);
}

// One CTA's part of a dispatch. `op` is the CTA's own copy.
__device__ inline void run_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  if (op.landing.max_tokens != 0) {
    run_landing_dispatch(op, cta, memory);
  } else {
    run_pushing_dispatch(op, cta, memory);
  }
}

}  // namespace epd::kernels::cuda
