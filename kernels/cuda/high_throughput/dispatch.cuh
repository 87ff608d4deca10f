// High-throughput dispatch. A warp loads a row once into shared memory, casts it there if necessary, and
// copies it to all its places by bulk stores.
#pragma once

#include "cuda/common/cast.cuh"
#include "cuda/common/placement.cuh"
#include "cuda/common/received.cuh"
#include "cuda/common/weights.cuh"
#include "cuda/high_throughput/stages.cuh"

namespace epd::kernels::cuda {

// A choice of a token, and where it sends the row. Lane k has choice k.
struct TokenChoice {
  std::int32_t expert = -1;
  std::int32_t row = -1;  // place at `rank`; -1: this lane sends nothing
  std::uint32_t rank = kFull;
  float weight = 0.0f;
};

// Loads the choices of a token. From token `end` on there are none.
__device__ inline TokenChoice load_choice(const Operation& op, std::uint32_t token, std::uint32_t end) {
  TokenChoice choice;
  if (token >= end || lane_of() >= op.shape.topk) return choice;
  EPD_BELOW(token, op.num_tokens);
  const std::uint32_t place = token * op.shape.topk + lane_of();
  choice.expert = op.routing.topk[place];
  choice.row = op.routing.rows[place];
  if (op.topk_weights != nullptr) choice.weight = __ldcg(op.topk_weights + place);
  return choice;
}

// Turns the row's number within the CTA that counted the token into its place at the target.
__device__ inline void place_choice(const Operation& op, const Shared& shared, std::uint32_t token,
                                    TokenChoice& choice) {
  if (choice.expert < 0) return;
  EPD_BELOW(choice.expert, op.shape.num_experts);
  choice.rank = choice.expert / experts_per_rank(op.shape);
  if (choice.row >= 0) EPD_BELOW(choice.row, op.shape.recv_rows);
  if (choice.row >= -1) return;
  const std::uint32_t* const base =
      op.shape.per_expert
          ? shared.base + choice.expert
          : shared.base + part_with(op.num_tokens, token, op.division.ctas) * op.shape.num_ranks +
                choice.rank;
  EPD_BELOW(base - shared.base, base_words(op));
  choice.row = static_cast<std::int32_t>(*base) - 2 - choice.row;
  EPD_BELOW(choice.row, op.shape.recv_rows);
}

// Layout compact: sends all of a token's choices with each row. Choices of other ranks become -1.
__device__ inline void send_choices(const Operation& op, const Shared& shared, std::uint32_t token,
                                    const TokenChoice& choice) {
  const std::uint32_t topk = op.shape.topk;
#pragma unroll 1
  for (std::uint32_t senders = __ballot_sync(kFull, choice.row >= 0); senders != 0; senders &= senders - 1) {
    const int lane = __ffs(static_cast<int>(senders)) - 1;
    const std::uint32_t rank = __shfl_sync(kFull, choice.rank, lane);
    const std::size_t row = __shfl_sync(kFull, choice.row, lane);
    EPD_BELOW(rank, op.shape.num_ranks);
    EPD_BELOW(row, op.shape.recv_rows);
    const DispatchTarget& target = shared.targets[rank];
    const bool here = choice.rank == rank;
    if (lane_of() < topk) {
      const auto first = static_cast<std::int32_t>(rank * experts_per_rank(op.shape));
      store_index(op, target.recv_topk_idx, row * topk + lane_of(), here ? choice.expert - first : -1);
      target.recv_topk_weights[row * topk + lane_of()] = here ? choice.weight : 0.0f;
    }
    if (lane_of() == 0) {
      reinterpret_cast<int2*>(target.recv_src)[row] = {static_cast<int>(op.rank), static_cast<int>(token)};
    }
  }
}

// Per-expert layouts: sends one choice with each row.
__device__ inline void send_choice(const Operation& op, const Shared& shared, std::uint32_t token,
                                   const TokenChoice& choice) {
  const float weight =
      op.topk_weights == nullptr ? 0.0f : sum_weights(op.shape.topk, choice.expert, choice.weight);
  if (choice.row < 0) return;
  EPD_BELOW(choice.rank, op.shape.num_ranks);
  EPD_BELOW(choice.row, op.shape.recv_rows);
  const DispatchTarget& target = shared.targets[choice.rank];
  const auto first = static_cast<std::int32_t>(choice.rank * experts_per_rank(op.shape));
  store_index(op, target.recv_topk_idx, choice.row, choice.expert - first);
  target.recv_topk_weights[choice.row] = weight;
  reinterpret_cast<int2*>(target.recv_src)[choice.row] = {static_cast<int>(op.rank), static_cast<int>(token)};
}

// Sends scales with ordinary stores, 16 or 4 bytes of a lane at a time. Scales are too short for bulk stores
// to pay.
template <typename Unit>
__device__ inline void send_scales(const Operation& op, const Shared& shared, const std::uint8_t* scales,
                                   const TokenChoice& choice) {
  const std::uint32_t units = op.shape.format.scale_bytes / sizeof(Unit);
#pragma unroll 1
  for (std::uint32_t senders = __ballot_sync(kFull, choice.row >= 0); senders != 0; senders &= senders - 1) {
    const int lane = __ffs(static_cast<int>(senders)) - 1;
    const std::uint32_t rank = __shfl_sync(kFull, choice.rank, lane);
    const std::size_t row = __shfl_sync(kFull, choice.row, lane);
    EPD_BELOW(rank, op.shape.num_ranks);
    EPD_BELOW(row, op.shape.recv_rows);
    Unit* const to = static_cast<Unit*>(shared.targets[rank].recv_scales) + row * units;
#pragma unroll 1
    for (std::uint32_t i = lane_of(); i < units; i += 32) to[i] = reinterpret_cast<const Unit*>(scales)[i];
  }
}

// The same, to columns (RowFormat::scale_pitch): a word of a lane at a time.
__device__ inline void send_scale_columns(const Operation& op, const Shared& shared,
                                          const std::uint8_t* scales, const TokenChoice& choice) {
  const RowFormat& format = op.shape.format;
#pragma unroll 1
  for (std::uint32_t senders = __ballot_sync(kFull, choice.row >= 0); senders != 0; senders &= senders - 1) {
    const int lane = __ffs(static_cast<int>(senders)) - 1;
    const std::uint32_t rank = __shfl_sync(kFull, choice.rank, lane);
    const std::uint32_t row = static_cast<std::uint32_t>(__shfl_sync(kFull, choice.row, lane));
    EPD_BELOW(rank, op.shape.num_ranks);
    EPD_BELOW(row, op.shape.recv_rows);
    auto* const to = static_cast<std::uint32_t*>(shared.targets[rank].recv_scales) + first_scale(format, row);
#pragma unroll 1
    for (std::uint32_t i = lane_of(); i < format.scale_bytes / 4; i += 32)
      to[std::size_t{i} * format.scale_pitch] = reinterpret_cast<const std::uint32_t*>(scales)[i];
  }
}

// The parts of a row in its stage. Without a cast: x, then its scales if it has any. With a cast: codes,
// scales, then x.
struct StageLayout {
  std::uint8_t* row;
  std::uint8_t* scales;
  std::uint8_t* x;
  __device__ StageLayout(const RowFormat& format, std::uint8_t* stage)
      : row(stage), scales(stage + format.row_bytes), x(stage) {
    if (format.cast) x += (format.row_bytes + format.scale_bytes + 127) / 128 * 128;
  }
};

// Starts the loads of a token's row and given scales.
__device__ inline void load_row(const Operation& op, const StageLayout& to, std::uint64_t* barrier,
                                std::uint32_t token) {
  EPD_BELOW(token, op.num_tokens);
  const RowFormat& format = op.shape.format;
  const bool scales = op.x_scales != nullptr;
  const std::uint8_t* const x = static_cast<const std::uint8_t*>(op.x) + std::size_t{token} * format.x_bytes;
  const bool bulk_x = format.x_bytes % 16 == 0;
  const bool bulk_scales = scales && bulk_x && format.scale_bytes % 16 == 0;
  if (lane_of() == 0)
    barrier_expect(barrier, (bulk_x ? format.x_bytes : 0) + (bulk_scales ? format.scale_bytes : 0));
  if (bulk_x) {
    warp_load(to.x, x, format.x_bytes, lane_of() == 0, barrier);
  } else {
    lanes_load_eights(to.x, x, format.x_bytes);
  }
  if (!scales) return;
  const std::uint8_t* from =
      static_cast<const std::uint8_t*>(op.x_scales) + std::size_t{token} * format.scale_bytes;
  if (bulk_scales) {
    warp_load(to.scales, from, format.scale_bytes, lane_of() == 0, barrier);
    return;
  }
#pragma unroll 1
  for (std::uint32_t i = lane_of(); i < format.scale_bytes / 4; i += 32) {
    reinterpret_cast<std::uint32_t*>(to.scales)[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  }
}

// Copies the row in the stage to all places of its token.
__device__ inline void send_row(const Operation& op, const Shared& shared, const StageLayout& stage,
                                const TokenChoice& choice) {
  const RowFormat& format = op.shape.format;
  const bool sends = choice.row >= 0;
  if (sends) EPD_BELOW(choice.rank, op.shape.num_ranks);
  if (sends) EPD_BELOW(choice.row, op.shape.recv_rows);
  const DispatchTarget& target = shared.targets[sends ? choice.rank : 0];
  const std::size_t row = sends ? choice.row : 0;
  std::uint8_t* const to = static_cast<std::uint8_t*>(target.recv_x) + row * format.row_bytes;
  if (format.row_bytes % 16 == 0) {
    warp_store(to, stage.row, format.row_bytes, sends);
  } else {
    warp_store_eights(to, stage.row, format.row_bytes, sends);
  }
  stores_commit();
  if (format.scale_bytes == 0) return;
  if (format.scale_pitch != 0) {
    send_scale_columns(op, shared, stage.scales, choice);
  } else if ((format.row_bytes | format.scale_bytes) % 16 == 0) {
    send_scales<uint4>(op, shared, stage.scales, choice);
  } else {
    send_scales<std::uint32_t>(op, shared, stage.scales, choice);
  }
}

// One copy warp. It loads and casts its first row before any place is known. If every CTA can find a token's
// place, warps claim tokens as they become free, because NVLink serves some SMs better than others. Else each
// CTA copies the tokens that it has counted.
class Dispatcher {
 public:
  __device__ Dispatcher(const Operation& op, Cta cta, const Shared& shared)
      : op_(op),
        shared_(shared),
        stages_(op, shared),
        stage_(op.shape.format, stages_.at(0)),
        copies_(warp_of() < op.division.warps),
        claims_(!op.shape.per_expert || op.cached) {
    const Range tokens = claims_ ? Range{0, op.num_tokens} : part_of(op.num_tokens, cta.index, cta.count);
    step_ = claims_ ? op.division.warps * cta.count : op.division.warps;
    end_ = copies_ ? tokens.end : 0;
    token_ = tokens.begin + warp_of() + (claims_ ? op.division.warps * cta.index : 0);
    next_ = kFull;
  }
  __device__ bool copies() const { return copies_; }

  // Starts the load of the first row.
  __device__ void begin() {
    if (!copies_) return;
    stages_.open(op_);
    if (token_ >= end_) return;
    load_row(op_, stage_, stages_.barriers, token_);
    next_ = following(claim(), token_);
  }

  // Waits for the first row and casts it.
  __device__ void prepare() {
    if (token_ >= end_) return;
    take_row();
    prepared_ = true;
  }

  // Copies all rows of the warp. Returns when all stores of the calling thread are performed.
  __device__ void run() {
    TokenChoice choice = load_choice(op_, token_, end_);
    while (token_ < end_) {
      const TokenChoice next_choice = load_choice(op_, next_, end_);
      const std::uint32_t claimed = claim();
      place_choice(op_, shared_, token_, choice);
      if (!prepared_) take_row();
      prepared_ = false;
      send_row(op_, shared_, stage_, choice);
      if (!op_.shape.format.cast) {
        wait_sent();
        load_next();
      }
      token_ = next_;
      choice = next_choice;
      next_ = following(claimed, next_);
    }
    stores_wait_done();
    stages_.close();
  }

  // Ends the warp's work when the operation has failed. No copy may be in flight to this CTA's memory when it
  // leaves.
  __device__ void abandon() {
    if (!copies_) return;
    const bool loads = prepared_ ? op_.shape.format.cast && next_ < end_ : token_ < end_;
    if (loads) barrier_wait(stages_.barriers, parity_);
    stages_.close();
  }

 private:
  // Claims a token. The warp claims early and uses the answer late, so that the atomic's latency is hidden.
  // Only lane 0 has the answer.
  __device__ std::uint32_t claim() const {
    return claims_ && lane_of() == 0 ? atomicAdd(&workspace(op_).claimed, 1) : 0;
  }
  // Returns the token after `token`: the claimed one, or the next of this CTA.
  __device__ std::uint32_t following(std::uint32_t claimed, std::uint32_t token) const {
    return step_ + (claims_ ? __shfl_sync(kFull, claimed, 0) : token);
  }
  __device__ void load_next() {
    if (next_ < end_) load_row(op_, stage_, stages_.barriers, next_);
  }
  // Waits until the stores have read the stage. It may then be written again.
  __device__ void wait_sent() {
    stores_wait_read();
    fence_async_shared();
    __syncwarp();
  }
  // Waits for the row and casts it if necessary. After a cast x is free, so the next load starts at once.
  __device__ void take_row() {
    barrier_wait(stages_.barriers, parity_);
    parity_ ^= 1;
    __syncwarp();
    if (op_.shape.format.cast) {
      wait_sent();
      cast_row(stage_.x, stage_.row, stage_.scales, op_.shape.format);
    }
    fence_async_shared();
    __syncwarp();
    if (op_.shape.format.cast) load_next();
  }

  const Operation& op_;
  const Shared& shared_;
  const Stages stages_;
  const StageLayout stage_;
  const bool copies_;
  const bool claims_;
  bool prepared_ = false;
  std::uint32_t parity_ = 0;
  std::uint32_t token_;
  std::uint32_t next_;
  std::uint32_t step_;
  std::uint32_t end_;
};

// Rows [begin, end) of recv_x.
struct RowSpan {
  std::uint64_t begin;
  std::uint64_t end;
};

// Marks rows of this rank that no token fills, and zeroes them if the client asks for it.
__device__ inline void fill_range(const Operation& op, Cta cta, const Team& team, RowSpan rows) {
  const DispatchTarget& own = op.peers[op.rank].target;
  const std::uint32_t choices = op.shape.per_expert ? 1 : op.shape.topk;
  const auto zero = [](void* memory, std::uint64_t row, std::uint32_t bytes) {
    auto* const words = reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(memory) + row * bytes);
#pragma unroll 1
    for (std::uint32_t i = lane_of(); i < bytes / 4; i += 32) words[i] = 0;
  };
  const std::uint32_t step = cta.count * team.warps;
#pragma unroll 1
  for (std::uint64_t row = rows.begin + cta.index * team.warps + team.warp(); row < rows.end; row += step) {
    EPD_BELOW(row, op.shape.recv_rows);
    if (lane_of() < choices) {
      store_index(op, own.recv_topk_idx, row * choices + lane_of(), -1);
      own.recv_topk_weights[row * choices + lane_of()] = 0.0f;
    }
    if (lane_of() == 0) reinterpret_cast<int2*>(own.recv_src)[row] = {-1, -1};
    if (!op.zero_padding) continue;
    zero(own.recv_x, row, op.shape.format.row_bytes);
    const RowFormat& format = op.shape.format;
    if (format.scale_pitch == 0) {
      zero(own.recv_scales, row, format.scale_bytes);
      continue;
    }
    auto* const scales = static_cast<std::uint32_t*>(own.recv_scales) + first_scale(format, row);
#pragma unroll 1
    for (std::uint32_t i = lane_of(); i < format.scale_bytes / 4; i += 32)
      scales[std::size_t{i} * format.scale_pitch] = 0;
  }
}

// Fills the rows that no token fills. Layout packed: always the padding, and with `mark_unused` also the rows
// after M. Other layouts: only with `mark_unused`.
__device__ inline void fill_rows(const Operation& op, Cta cta, const Shared& shared, const Team& team) {
  const bool packed = op.shape.per_expert && !op.shape.expert_blocks;
  if (!packed && !op.mark_unused) return;
  std::uint64_t end = 0;
  if (op.shape.per_expert) {
#pragma unroll 1
    for (std::uint32_t i = 0; i < experts_per_rank(op.shape); ++i) {
      EPD_BELOW(i * 2 + 1, ends_words(op));
      fill_range(op, cta, team, {shared.ends[i * 2], shared.ends[i * 2 + 1]});
      end = shared.ends[i * 2 + 1];
    }
  } else {
    end = op.cached ? num_recv_rows(op) : rank_column(op, op.rank, 0).total;
  }
  if (op.mark_unused) fill_range(op, cta, team, {end, op.shape.recv_rows});
}

// Sets `ends` from the recorded placement, for a dispatch that reuses a routing.
__device__ inline void recall_placement(const Operation& op, const Shared& shared) {
  const PlacementSections at(op.shape);
  const std::uint32_t experts = op.shape.per_expert ? experts_per_rank(op.shape) : 0;
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < experts; i += blockDim.x) {
    const std::int32_t first = op.routing.placement[at.expert_offsets + i];
    EPD_BELOW(i * 2 + 1, ends_words(op));
    shared.ends[i * 2] = first + op.routing.placement[at.expert_counts + i];
    shared.ends[i * 2 + 1] = op.routing.placement[at.expert_offsets + i + 1];
  }
  __syncthreads();
}

// Counts and exchanges the choices, or recalls a routing, and computes all places. Returns false if the
// operation has failed.
__device__ inline bool route(Operation& op, Cta cta, const Shared& shared, Dispatcher& dispatcher,
                             std::uint64_t deadline_ns) {
  const Peer& own = op.peers[op.rank];
  if (op.cached) {
    if (cta.index == 0) announce(op);
    recall_placement(op, shared);
    dispatcher.prepare();
  } else {
    if (!count_choices(op, cta, shared)) return false;
    dispatcher.prepare();
    if (!wait_signals(op, own.ready, 1u << op.rank, deadline_ns)) return false;
    sum_lower_ctas(op, cta, shared);
  }
  if (!wait_signals(op, own.ready, active_ranks(op), deadline_ns)) return false;
  if (!check_announcements(op)) return false;
  if (op.memories != nullptr) {
    if (threadIdx.x < op.shape.num_ranks)
      shared.targets[threadIdx.x].recv_x = op.peers[threadIdx.x].target.recv_x;
    __syncthreads();
  }
  return op.cached || place_rows(op, shared, whole_cta());
}

// Sends what goes beside the rows of the CTA's tokens: choices, weights, sources. Stores their places in the
// routing for later operations.
__device__ inline void send_metadata(const Operation& op, Cta cta, const Shared& shared,
                                     const Team& metadata_team) {
  const Range tokens = part_of(op.num_tokens, cta.index, cta.count);
  TokenChoice next = load_choice(op, tokens.begin + metadata_team.warp(), tokens.end);
#pragma unroll 1
  for (std::uint32_t token = tokens.begin + metadata_team.warp(); token < tokens.end;
       token += metadata_team.warps) {
    TokenChoice choice = next;
    next = load_choice(op, token + metadata_team.warps, tokens.end);
    place_choice(op, shared, token, choice);
    if (choice.row >= 0 && !op.cached) op.routing.rows[token * op.shape.topk + lane_of()] = choice.row;
    if (op.shape.per_expert) {
      send_choice(op, shared, token, choice);
    } else {
      send_choices(op, shared, token, choice);
    }
  }
}

// The work of the metadata warps. CTA 0 also records and delivers the placement. It does so first, so that
// the CPU sees the counts early. With few tokens it does so last, since this would delay the whole
// operation.
__device__ inline void run_metadata_warps(const Operation& op, Cta cta, const Shared& shared) {
  const Team metadata_team{op.division.warps, blockDim.x / 32 - op.division.warps};
  const bool few = op.num_tokens <= 4 * cta.count * metadata_team.warps;
  if (few) send_metadata(op, cta, shared, metadata_team);
  if (cta.index == 0) {
    if (!op.cached) record_placement(op, shared, metadata_team);
    deliver_counts(op, metadata_team);
  }
  if (!few) send_metadata(op, cta, shared, metadata_team);
  fill_rows(op, cta, shared, metadata_team);
}

// Runs one CTA's part of a high-throughput dispatch. `op` is the CTA's own copy.
__device__ inline void run_high_throughput_dispatch(Operation& op, Cta cta, std::uint8_t* memory) {
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(op, memory);
  if (threadIdx.x < op.shape.num_ranks) shared.targets[threadIdx.x] = op.peers[threadIdx.x].target;
  Dispatcher dispatcher(op, cta, shared);
  dispatcher.begin();
  if (!route(op, cta, shared, dispatcher, deadline_ns)) {
    dispatcher.abandon();
    return;
  }
  if (dispatcher.copies()) {
    dispatcher.run();
  } else {
    run_metadata_warps(op, cta, shared);
  }
  finish(op, cta, deadline_ns, [&op] { return num_recv_rows(op); });
}

}  // namespace epd::kernels::cuda
