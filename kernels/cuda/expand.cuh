// Dispatch through landings: a row crosses the wire once for each rank, before its places are known; the
// receiver works them out from everybody's choices and spreads the row over its experts' rows as it lands.
#pragma once

#include "cuda/choice_bits.cuh"
#include "cuda/dispatch.cuh"

namespace epd::kernels::cuda {

// Where the parts of a landed row lie: row, scales, weights; and behind them in a stage what it is cast from.
struct LandedRow {
  std::uint32_t weights;
  std::uint32_t bytes;
  std::uint32_t pitch;  // of rows in a stage

  __device__ explicit LandedRow(const Operation& op) {
    weights = (op.shape.format.row_bytes + op.shape.format.scale_bytes + 15) / 16 * 16;
    bytes = weights + (op.shape.topk * 4 + 15) / 16 * 16;
    pitch = (bytes + 127) / 128 * 128;
  }
  __device__ StageLayout in_stage(const Operation& op, std::uint8_t* stage) const {
    StageLayout layout(op.shape.format, stage);
    if (op.shape.format.cast) layout.x = stage + pitch;
    return layout;
  }
};

// A landed row; lane k has choice k.
struct LandedToken {
  std::uint32_t source = 0;
  std::uint32_t token = kFull;
  std::uint32_t expert = kFull;
  std::int32_t row = -1;  // that the choice sends it to
  __device__ bool none() const { return token == kFull; }
};

// One warp that moves rows: it sends those of this rank's tokens, then spreads what has landed. CTA 0 keeps
// the books and moves none, if there are others.
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

  // The first row comes, and all choices are looked at, while others are waited for. False: a choice was
  // refused.
  __device__ bool begin() {
    if (!moves_) return true;
    stages_.open();
    load(token_);
    const std::int64_t first = read(token_);
    weight_ = read_weight(token_);
    bool good = true;
#pragma unroll 1
    for (std::uint32_t token = token_; token < op_.num_tokens; token += step_) {
      const std::int32_t expert = accept(token, token == token_ ? first : read(token));
      if (token == token_) expert_ = expert;
      good = good && !__any_sync(kFull, expert < -1);
      if (!op_.cached && lane_of() < op_.shape.topk)
        op_.routing.topk[token * op_.shape.topk + lane_of()] = expert;
    }
    return good;
  }

  // Tells everybody what its tokens have chosen.
  __device__ void tell_choices() const {
#pragma unroll 1
    for (std::uint32_t token = token_; token < op_.num_tokens; token += step_) {
      tell_token(token, token == token_ ? expert_ : read_again(token));
    }
  }

  // Returns when all is released.
  __device__ void send() {
#pragma unroll 1
    for (bool first = true; token_ < op_.num_tokens; first = false) {
      if (!first) {
        expert_ = read_again(token_);
        weight_ = read_weight(token_);
      }
      take();
      if (lane_of() < op_.shape.topk)
        reinterpret_cast<float*>(stage_.row + landed_.weights)[lane_of()] = weight_;
      fence_async_shared();
      __syncwarp();
      send_one();
      token_ += step_;
      load(token_);
    }
  }

  // Spreads landed rows, as warps get free; one comes while another leaves. False: the operation has failed.
  __device__ bool spread(const ChoiceBits& bits, std::uint64_t deadline_ns) {
    if (!wait_places()) return leave(false);
    std::uint32_t most = 0;
#pragma unroll 1
    for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s) most = max(most, board_.tokens[s]);
    LandedToken coming = next_landed(bits, most);
    bool good = true;
    if (!coming.none()) good = fetch(coming, 0, deadline_ns);
#pragma unroll 1
    for (std::uint32_t buffer = 0; good && !coming.none(); buffer ^= 1) {
      const LandedToken now = coming;
      coming = next_landed(bits, most);
      const bool early = !coming.none() && is_there_now(coming);
      if (early) fetch_now(coming, buffer ^ 1);
      store(now, buffer);
      if (!early && !coming.none()) good = fetch(coming, buffer ^ 1, deadline_ns);
    }
    return leave(good);
  }

  // After begin(), in place of send(). Nothing may be on its way into this CTA's memory when it leaves.
  __device__ void abandon() {
    if (!moves_) return;
    if (token_ < op_.num_tokens) wait_loaded(0);
    stages_.close();
  }

 private:
  // ---- tokens of this rank
  __device__ void load(std::uint32_t token) {
    if (token < op_.num_tokens) load_row(op_, stage_, stages_.barriers, token);
  }
  // The row as it leaves.
  __device__ void take() {
    wait_loaded(0);
    if (op_.shape.format.cast) cast_row(stage_.x, stage_.row, stage_.scales, op_.shape.format);
  }
  __device__ bool has_choice(std::uint32_t token) const {
    return token < op_.num_tokens && lane_of() < op_.shape.topk;
  }
  // Choice `lane` of a token, read once from memory that the client may be changing; or from a known routing.
  __device__ std::int64_t read(std::uint32_t token) const {
    if (!has_choice(token)) return -1;
    return op_.cached ? read_again(token) : read_choice(op_, token * op_.shape.topk + lane_of());
  }
  // As it was accepted.
  __device__ std::int32_t read_again(std::uint32_t token) const {
    return has_choice(token) ? __ldcg(op_.routing.topk + token * op_.shape.topk + lane_of()) : -1;
  }
  __device__ float read_weight(std::uint32_t token) const {
    if (op_.topk_weights == nullptr || !has_choice(token)) return 0.0f;
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
#pragma unroll 1
    for (std::uint32_t first = 0; first < count; first += 32) {
      const std::uint32_t i = first + lane_of();
      std::uint64_t value = 0;
#pragma unroll 1
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
  __device__ void send_one() const {
    const std::uint32_t rank = expert_ < 0 ? 0 : expert_ / experts_per_rank(op_.shape);
    const std::uint32_t ranks = __reduce_or_sync(kFull, expert_ < 0 ? 0u : 1u << rank);
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

  // ---- what has landed
  __device__ bool wait_places() const {
    const volatile std::uint32_t* const placed = &board_.placed;
    while (*placed == 0) {
    }
    __threadfence_block();
    __syncwarp();
    return *placed == LandingBoard::kPlaced;
  }
  // Of this CTA's share.
  __device__ std::uint32_t claim() const {
    std::uint32_t next = 0;
    if (lane_of() == 0) next = atomicAdd(&board_.claimed, 1);
    return cta_.index + cta_.count * __shfl_sync(kFull, next, 0);
  }
  // The next that this rank takes.
  __device__ LandedToken next_landed(const ChoiceBits& bits, std::uint32_t most) const {
    const std::uint32_t ranks = op_.shape.num_ranks;
#pragma unroll 1
    for (std::uint32_t i = claim(); i < most * ranks; i = claim()) {
      LandedToken landed;
      landed.source = (i + op_.rank) % ranks;
      landed.token = i / ranks;
      if (landed.token >= board_.tokens[landed.source]) continue;
      landed.expert = chosen_expert(op_, landed.source, landed.token, lane_of());
      const std::uint32_t same = __match_any_sync(kFull, landed.expert);
      const std::uint32_t local = bits.local(landed.expert);
      if (local < experts_per_rank(op_.shape) && (same & lanes_below()) == 0)
        landed.row = static_cast<std::int32_t>(bits.row(local, landed.source, landed.token));
      if (__any_sync(kFull, landed.row >= 0)) return landed;
    }
    return {};
  }
  __device__ std::uint8_t* buffer_at(std::uint32_t buffer) const {
    return stage_.row + buffer * landed_.pitch;
  }
  __device__ const std::uint64_t* tag_of(const LandedToken& landed) const {
    return landed_tag(op_, op_.rank, landed.source, landed.token, 0);
  }
  __device__ bool is_there_now(const LandedToken& landed) const {
    const bool there = lane_of() != 0 || load_acquire_system(tag_of(landed)) >= op_.tag;
    __syncwarp();
    return __all_sync(kFull, there) != 0;
  }
  __device__ bool fetch(const LandedToken& landed, std::uint32_t buffer, std::uint64_t deadline_ns) const {
    if (!wait_words(op_, tag_of(landed), lane_of() == 0, landed.source, deadline_ns)) return false;
    fetch_now(landed, buffer);
    return true;
  }
  // Into a buffer, from which the row before last has left.
  __device__ void fetch_now(const LandedToken& landed, std::uint32_t buffer) const {
    stores_wait_read();
    fence_async();
    __syncwarp();
    if (lane_of() == 0) barrier_expect(stages_.barriers + buffer, landed_.bytes);
    warp_load(buffer_at(buffer), landing_slot(op_, op_.rank, landed.source, landed.token), landed_.bytes,
              lane_of() == 0, stages_.barriers + buffer);
  }
  // To its rows.
  __device__ void store(const LandedToken& landed, std::uint32_t buffer) {
    wait_loaded(buffer);
    fence_async_shared();
    __syncwarp();
    TokenChoice place;
    place.rank = op_.rank;
    place.row = landed.row;
    send_row(op_, shared_, landed_.in_stage(op_, buffer_at(buffer)), place);
    const auto* const weights = reinterpret_cast<const float*>(buffer_at(buffer) + landed_.weights);
    const float weight =
        sum_weights(op_.shape.topk, landed.expert, lane_of() < op_.shape.topk ? weights[lane_of()] : 0.0f);
    if (landed.row < 0) return;
    const DispatchTarget& own = shared_.targets[op_.rank];
    const std::uint32_t first = op_.rank * experts_per_rank(op_.shape);
    store_index(op_, own.recv_topk_idx, landed.row, static_cast<std::int32_t>(landed.expert - first));
    own.recv_topk_weights[landed.row] = weight;
    reinterpret_cast<int2*>(own.recv_src)[landed.row] = {static_cast<int>(landed.source),
                                                         static_cast<int>(landed.token)};
  }
  __device__ void wait_loaded(std::uint32_t buffer) {
    barrier_wait(stages_.barriers + buffer, (parities_ >> buffer) & 1);
    parities_ ^= 1u << buffer;
    __syncwarp();
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
  std::uint32_t parities_ = 0;  // of the two buffers
  std::uint32_t token_;
  std::uint32_t step_;
  std::int32_t expert_ = -1;  // choice `lane` of the token
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
    *static_cast<volatile std::uint32_t*>(&board.placed) =
        good ? LandingBoard::kPlaced : LandingBoard::kNowhere;
  }
  return good;
}

// CTA 0: what a routing leaves for later operations, and the counts. False: failed.
__device__ inline bool keep_landing_books(const Operation& op, const Shared& shared, const Team& clerks,
                                          const ChoiceBits& bits) {
  if (op.cached) {
    deliver_counts(op, clerks);
  } else {
    std::int32_t* const words = bits.placement_words(shared);
    if (!bits.place_own(clerks, shared.base)) return false;
    bits.write_placement(clerks, shared, words);
    deliver_words(op, clerks, words, op.routing.placement);
    bits.write_rows(clerks, shared.base);
  }
  if (clerks.warp() == clerks.warps - 1) {
    const std::uint32_t rows = bits.num_rows(shared.ends);
    if (lane_of() == 0) workspace(op).rows = rows;
  }
  return true;
}

// All warps of a CTA but the last.
__device__ inline bool dispatch_landing(const Operation& op, Cta cta, const Shared& shared,
                                        LandingBoard& board, std::uint64_t deadline_ns) {
  const ChoiceBits bits(op, cta, shared);
  Carrier carrier(op, cta, shared, board);
  if (cta.index == 0 && warp_of() == 0) say_hello(op);
  bits.clear(herald_warp() * 32);
  if (!wait_hello(op, board, carrier.begin(), deadline_ns)) {
    carrier.abandon();
    return false;
  }
  if (carrier.moves()) {
    carrier.tell_choices();
    carrier.send();
    tell_others(op, cta, board, op.movers.warps + (cta.index == 0));
    return carrier.spread(bits, deadline_ns);
  }
  const Team fillers{op.movers.warps, herald_warp() - op.movers.warps};
  const Team clerks = cta.index == 0 && cta.count > 1 ? Team{0, herald_warp()} : fillers;
  if (!find_places(op, shared, clerks, bits, board, deadline_ns)) return false;
  if (cta.index == 0 && !keep_landing_books(op, shared, clerks, bits)) return false;
  if (warp_of() >= op.movers.warps) fill_rows(op, cta, shared, fillers);
  return true;
}

// One CTA's part of a dispatch through landings.
__device__ __noinline__ inline void run_landing_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  __shared__ LandingBoard board;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(Kind::kDispatch, op, memory);
  if (threadIdx.x < op.shape.num_ranks) shared.targets[threadIdx.x] = op.peers[threadIdx.x].target;
  if (threadIdx.x == 0) board = {};
  __syncthreads();
  bool good = true;
  if (warp_of() != herald_warp()) {
    good = dispatch_landing(op, cta, shared, board, deadline_ns);
  } else if (cta.index == 0) {
    good = herald(op, cta, board, cta.count > 1 ? 1 : op.movers.warps + 1, deadline_ns);
  }
  if (__syncthreads_or(!good) != 0) return;
  const auto count_rows = [&op] { return __ldcg(&workspace(op).rows); };
  finish(op, cta, deadline_ns, count_rows, true);
}

// What the record held is overwritten from now on, by each CTA behind its own barrier; if the engine dies
// meanwhile, nobody may take it for a routing. All threads call.
__device__ inline void open_routing(const Operation& op) {
  if (op.routing.head == nullptr) return;
  if (threadIdx.x == 0) {
    *static_cast<volatile std::uint64_t*>(&op.routing.head->handle) = 0;
    fence_device();
  }
  __syncthreads();
}

// One CTA's part of a dispatch. `op` is the CTA's own copy.
__device__ inline void run_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  open_routing(op);
  if (op.landing.max_tokens != 0) {
    run_landing_dispatch(op, cta, memory);
  } else {
    run_pushing_dispatch(op, cta, memory);
  }
}

}  // namespace epd::kernels::cuda
