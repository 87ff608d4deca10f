// Dispatch through landings: a row crosses the wire once for each rank, before its places are known; the receiver
// works them out from everybody's choices and spreads the row over its experts' rows as it lands.
#pragma once

#include "cuda/choice_bits.cuh"
#include "cuda/dispatch.cuh"

namespace epd::kernels::cuda {

// Where the parts of a landed row lie: row, scales, weights; and behind them in a stage what it is cast from.
struct LandedRow {
  std::uint32_t weights;
  std::uint32_t bytes;

  __device__ explicit LandedRow(const Operation& op) {
    weights = (op.shape.format.row_bytes + op.shape.format.scale_bytes + 15) / 16 * 16;
    bytes = weights + (op.shape.topk * 4 + 15) / 16 * 16;
  }
  __device__ StageLayout in_stage(const Operation& op, std::uint8_t* stage) const {
    StageLayout layout(op.shape.format, stage);
    if (op.shape.format.cast) layout.x = stage + (bytes + 127) / 128 * 128;
    return layout;
  }
};

// One warp that moves rows: it sends those of this rank's tokens, then spreads what has landed. CTA 0 keeps the books
// and moves none, if there are others.
class Carrier {
 public:
  __device__ Carrier(const Operation& op, Cta cta, const Shared& shared, LandingBoard& board)
      : op_(op),
        board_(board),
        shared_(shared),
        stages_(op, shared),
        landed_(op),
        stage_(landed_.in_stage(op, stages_.at(0))),
        cta_(cta.count == 1 ? cta : Cta{cta.index - 1, cta.count - 1}),
        moves_(warp_of() < op.movers.warps && (cta.count == 1 || cta.index != 0)) {
    step_ = cta_.count * op.movers.warps;
    token_ = moves_ ? cta_.index + cta_.count * warp_of() : op.num_tokens;
  }
  __device__ bool moves() const { return moves_; }

  // The first row and its choices come while others are waited for.
  __device__ void begin() {
    if (!moves_) return;
    stages_.open();
    load(token_);
    choice_ = read(token_);
    weight_ = read_weight(token_);
  }

  // Tells everybody what its tokens have chosen. False: a choice was refused.
  __device__ bool tell_choices() {
    for (std::uint32_t token = token_; token < op_.num_tokens; token += step_) {
      const std::int32_t expert = accept(token, token == token_ ? choice_ : read(token));
      if (__any_sync(kFull, expert < -1)) return false;
      if (token == token_) choice_ = expert;
      if (!op_.cached && lane_of() < op_.shape.topk)
        op_.routing.topk[token * op_.shape.topk + lane_of()] = expert;
      tell_token(token, expert);
    }
    return true;
  }

  // Returns when all is released.
  __device__ void send() {
    for (bool first = true; token_ < op_.num_tokens; first = false) {
      const bool has = lane_of() < op_.shape.topk;
      if (!first) {
        choice_ = has ? __ldcg(op_.routing.topk + token_ * op_.shape.topk + lane_of()) : -1;
        weight_ = read_weight(token_);
      }
      take();
      if (has) reinterpret_cast<float*>(stage_.row + landed_.weights)[lane_of()] = weight_;
      fence_async_shared();
      __syncwarp();
      send_one(static_cast<std::int32_t>(choice_));
      token_ += step_;
      load(token_);
    }
  }

  // Spreads landed rows, as warps get free. False: the operation has failed.
  __device__ bool spread(const ChoiceBits& bits, std::uint64_t deadline_ns) {
    if (!wait_places()) return leave(false);
    const std::uint32_t ranks = op_.shape.num_ranks;
    std::uint32_t most = 0;
    for (std::uint32_t s = 0; s < ranks; ++s) most = max(most, board_.tokens[s]);
    for (std::uint32_t i = claim(); i < most * ranks; i = claim()) {
      const std::uint32_t source = (i + op_.rank) % ranks;
      if (i / ranks >= board_.tokens[source]) continue;
      if (!spread_one(bits, source, i / ranks, deadline_ns)) return leave(false);
    }
    return leave(true);
  }

  // The operation has failed: nothing may be on its way into this CTA's memory when it leaves.
  __device__ void abandon() {
    if (!moves_) return;
    if (token_ < op_.num_tokens) barrier_wait(stages_.barriers, parity_);
    stages_.close();
  }

 private:
  __device__ void load(std::uint32_t token) {
    if (token < op_.num_tokens) load_row(op_, stage_, stages_.barriers, token);
  }
  __device__ void wait_loaded() {
    barrier_wait(stages_.barriers, parity_);
    parity_ ^= 1;
    __syncwarp();
  }
  // The row as it leaves.
  __device__ void take() {
    wait_loaded();
    if (op_.shape.format.cast) cast_row(stage_.x, stage_.row, stage_.scales, op_.shape.format);
  }

  // Choice `lane` of a token, read once from memory that the client may be changing; or from a known routing.
  __device__ std::int64_t read(std::uint32_t token) const {
    if (token >= op_.num_tokens || lane_of() >= op_.shape.topk) return -1;
    const std::uint32_t place = token * op_.shape.topk + lane_of();
    return op_.cached ? __ldcg(op_.routing.topk + place) : read_choice(op_, place);
  }
  __device__ float read_weight(std::uint32_t token) const {
    if (op_.topk_weights == nullptr || token >= op_.num_tokens || lane_of() >= op_.shape.topk) return 0.0f;
    return __ldcg(op_.topk_weights + token * op_.shape.topk + lane_of());
  }
  // -1 also for ranks that are not there, -2 for what is refused.
  __device__ std::int32_t accept(std::uint32_t token, std::int64_t value) const {
    if (value == -1 || op_.cached) return static_cast<std::int32_t>(value);
    if (value < 0 || value >= op_.shape.num_experts) {
      refuse(op_, token * op_.shape.topk + lane_of(), value);
      return -2;
    }
    const auto expert = static_cast<std::int32_t>(value);
    if (is_there(op_, expert / experts_per_rank(op_.shape))) return expert;
    atomicAdd(&workspace(op_).dropped, 1);
    return -1;
  }
  // Words of four choices, each to all ranks.
  __device__ void tell_token(std::uint32_t token, std::int32_t expert) const {
    const std::uint32_t words = chosen_per_token(op_.shape);
    const std::uint32_t count = words * op_.shape.num_ranks;
    for (std::uint32_t first = 0; first < count; first += 32) {
      const std::uint32_t i = first + lane_of();
      std::uint64_t value = 0;
      for (std::uint32_t j = 0; j < 4; ++j) {
        const std::uint32_t k = i % words * 4 + j;
        const std::int32_t other = __shfl_sync(kFull, expert, static_cast<int>(k));
        value |= std::uint64_t{static_cast<std::uint16_t>(k < op_.shape.topk ? other : -1)} << (16 * j);
      }
      if (i < count && is_there(op_, i / words))
        tell(chosen_words(op_, i / words, op_.rank, token) + i % words, op_.tag, value);
    }
  }
  // To every rank that the token has chosen.
  __device__ void send_one(std::int32_t expert) {
    const std::uint32_t rank = expert < 0 ? 0 : expert / experts_per_rank(op_.shape);
    const std::uint32_t ranks = __reduce_or_sync(kFull, expert < 0 ? 0u : 1u << rank);
    const bool mine = ((ranks >> lane_of()) & 1) != 0;
    const std::uint32_t to = mine ? lane_of() : op_.rank;
    warp_store(landing_slot(op_, to, op_.rank, token_), stage_.row, landed_.bytes, mine);
    stores_commit();
    stores_wait_done();
    __syncwarp();
    if (mine) store_release_system(landed_tag(op_, to, op_.rank, token_, 0), op_.tag);
    fence_async_shared();
    __syncwarp();
  }

  __device__ bool wait_places() const {
    const volatile std::uint32_t* const placed = &board_.placed;
    while (*placed == 0) {
    }
    __threadfence_block();
    __syncwarp();
    return *placed == LandingBoard::kPlaced;
  }
  // A landed row of this CTA's share.
  __device__ std::uint32_t claim() const {
    std::uint32_t next = 0;
    if (lane_of() == 0) next = atomicAdd(&board_.claimed, 1);
    return cta_.index + cta_.count * __shfl_sync(kFull, next, 0);
  }

  __device__ bool spread_one(const ChoiceBits& bits, std::uint32_t source, std::uint32_t token,
                             std::uint64_t deadline_ns) {
    const std::uint32_t expert = chosen_expert(op_, source, token);
    const std::uint32_t same = __match_any_sync(kFull, expert);
    TokenChoice place;
    place.rank = op_.rank;
    const std::uint32_t local = bits.local(expert);
    if (local < experts_per_rank(op_.shape) && (same & lanes_below()) == 0)
      place.row = static_cast<std::int32_t>(bits.row(local, source, token));
    if (__ballot_sync(kFull, place.row >= 0) == 0) return true;
    if (!wait_words(op_, landed_tag(op_, op_.rank, source, token, 0), lane_of() == 0, source, deadline_ns))
      return false;
    stores_wait_read();
    fence_async();
    __syncwarp();
    if (lane_of() == 0) barrier_expect(stages_.barriers, landed_.bytes);
    warp_load(stage_.row, landing_slot(op_, op_.rank, source, token), landed_.bytes, lane_of() == 0,
              stages_.barriers);
    wait_loaded();
    fence_async_shared();
    __syncwarp();
    send_row(op_, shared_, stage_, place);
    const float* const weights = reinterpret_cast<const float*>(stage_.row + landed_.weights);
    const float weight =
        sum_weights(op_.shape.topk, expert, lane_of() < op_.shape.topk ? weights[lane_of()] : 0.0f);
    if (place.row < 0) return true;
    const DispatchTarget& own = shared_.targets[op_.rank];
    store_index(op_, own.recv_topk_idx, place.row, static_cast<std::int32_t>(local));
    own.recv_topk_weights[place.row] = weight;
    reinterpret_cast<int2*>(own.recv_src)[place.row] = {static_cast<int>(source), static_cast<int>(token)};
    return true;
  }
  __device__ bool leave(bool good) const {
    stores_wait_done();
    stages_.close();
    return good;
  }

  const Operation& op_;
  LandingBoard& board_;
  const Shared& shared_;
  const Stages stages_;
  const LandedRow landed_;
  const StageLayout stage_;
  const Cta cta_;  // among those that move rows
  const bool moves_;
  std::uint32_t parity_ = 0;
  std::uint32_t token_;
  std::uint32_t step_;
  std::int64_t choice_ = -1;  // `lane` of the token
  float weight_ = 0.0f;       // likewise
};

// The clerks' part of every CTA: places, from everybody's choices. False: failed.
__device__ inline bool find_places(const Operation& op, const Shared& shared, const Team& clerks,
                                   const ChoiceBits& bits, LandingBoard& board, std::uint64_t deadline_ns) {
  bool good = clerks.all(bits.collect(clerks, board.tokens, deadline_ns));
  if (good) {
    bits.count(clerks);
    good = bits.place(clerks, shared.ends);
  }
  if (clerks.thread() == 0) {
    __threadfence_block();
    *static_cast<volatile std::uint32_t*>(&board.placed) = good ? LandingBoard::kPlaced : LandingBoard::kNowhere;
  }
  return good;
}

// CTA 0: what a routing leaves for later operations, and the counts.
__device__ inline bool keep_landing_books(const Operation& op, const Shared& shared, const Team& clerks,
                                          const ChoiceBits& bits) {
  if (!op.cached) {
    bits.write_counts(clerks);
    for (std::uint32_t e = clerks.thread(); e < op.shape.num_experts; e += clerks.threads()) shared.base[e] = 0;
    clerks.sync();
    if (!place_rows(op, shared, clerks)) return false;
    record_placement(op, shared, clerks);
    bits.write_rows(clerks, shared.base);
  }
  deliver_counts(op, clerks);
  if (clerks.thread() == 0) workspace(op).rows = num_recv_rows(op);
  return true;
}

// One CTA's part of a dispatch through landings.
__device__ inline void run_landing_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  __shared__ LandingBoard board;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(Kind::kDispatch, op, memory);
  const Team clerks{op.movers.warps, blockDim.x / 32 - op.movers.warps};
  if (cta.index == 0 && warp_of() == 0) say_hello(op);
  if (threadIdx.x < op.shape.num_ranks) shared.targets[threadIdx.x] = op.peers[threadIdx.x].target;
  if (threadIdx.x == 0) board = {};
  const ChoiceBits bits(op, cta, shared);
  Carrier carrier(op, cta, shared, board);
  carrier.begin();
  bits.clear();
  if (cta.index == 0) announce(op);
  if (!wait_hello(op, board, deadline_ns) || (cta.count == 1 && !wait_ready(op, deadline_ns))) {
    carrier.abandon();
    return;
  }
  bool good = true;
  if (carrier.moves()) {
    good = carrier.tell_choices();
    if (good) {
      carrier.send();
      tell_others(op, cta, board, op.movers.warps);
      good = carrier.spread(bits, deadline_ns);
    } else {
      carrier.abandon();
    }
  } else if (warp_of() >= op.movers.warps) {
    good = find_places(op, shared, clerks, bits, board, deadline_ns);
    if (good && cta.index == 0) good = keep_landing_books(op, shared, clerks, bits);
    if (good) fill_rows(op, cta, shared, clerks);
  } else if (warp_of() == 0) {  // of CTA 0
    good = warp_checks_ready(op, deadline_ns);
    if (good) tell_others(op, cta, board, 1);
  }
  if (__syncthreads_or(!good) != 0) return;
  const auto count_rows = [&op] { return __ldcg(&workspace(op).rows); };
  finish(op, cta, deadline_ns, count_rows, true);
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
