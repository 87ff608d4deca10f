// High-throughput combine. A warp pulls the rows of a token into shared memory, a piece of each row at a
// time, adds them up in float32 and stores the sum.
#pragma once

#include "cuda/common/signal.cuh"
#include "cuda/common/sums.cuh"
#include "cuda/common/weights.cuh"
#include "cuda/high_throughput/stages.cuh"

namespace epd::kernels::cuda {

// A row that a token's sum takes. Lane k has the row of choice k. A row of weight 0 is not pulled.
struct PulledRow {
  bool pulls = false;
  std::uint32_t rank = kFull;
  std::int32_t row = 0;
  std::uint32_t position = 0;  // the row's position among the token's rows: by rank, then by k
  std::uint32_t num_rows = 0;  // number of rows of the token
  std::uint32_t ends = 0;      // bit p: row p is the last one of its rank
  float weight = 1.0f;
};

// Choice k as lane k loads it from the routing.
struct RawChoice {
  std::int32_t expert = -1;
  std::int32_t row = -1;
  float weight = 1.0f;
};

// Loads the choices of a token. Past the last token there are none.
__device__ inline RawChoice load_raw(const Operation& op, std::uint32_t token) {
  RawChoice raw;
  if (token >= op.num_tokens || lane_of() >= op.shape.topk) return raw;
  const std::uint32_t place = token * op.shape.topk + lane_of();
  raw.expert = __ldcg(op.routing.topk + place);
  raw.row = __ldcg(op.routing.rows + place);
  if (op.topk_weights != nullptr) raw.weight = __ldcg(op.topk_weights + place);
  EPD_BELOW_OR_NONE(raw.expert, op.shape.num_experts);
  EPD_BELOW_OR_NONE(raw.row, op.shape.recv_rows);
  return raw;
}

// Finds the row of each choice: its rank, position and weight. All lanes of a warp call.
template <bool kPerExpert>
__device__ inline PulledRow resolve_row(const Operation& op, const RawChoice& raw) {
  PulledRow pulled;
  if (raw.expert >= 0) pulled.rank = raw.expert / op.shape.experts_per_rank;
  if (raw.row >= 0) EPD_BELOW(pulled.rank, op.shape.num_ranks);
  pulled.row = raw.row;
  if (op.topk_weights != nullptr) {
    const std::uint32_t key = kPerExpert ? static_cast<std::uint32_t>(raw.expert) : pulled.rank;
    pulled.weight = sum_weights(op.shape.topk, key, raw.weight);
  }
  pulled.pulls = raw.row >= 0 && pulled.weight != 0.0f && op.peers[pulled.rank].source.y != nullptr;
  const std::uint32_t pullers = __ballot_sync(kFull, pulled.pulls);
  pulled.num_rows = __popc(pullers);
  if constexpr (kPerExpert) {
    const std::uint32_t same = __match_any_sync(kFull, pulled.rank) & pullers;
    pulled.position = __popc(same & lanes_below());
    for (std::uint32_t lanes = pullers; lanes != 0; lanes &= lanes - 1) {
      const std::uint32_t rank = __shfl_sync(kFull, pulled.rank, __ffs(static_cast<int>(lanes)) - 1);
      if (rank < pulled.rank) ++pulled.position;
    }
    const bool is_end = pulled.pulls && (same & ~lanes_below()) == (1u << lane_of());
    pulled.ends = __reduce_or_sync(kFull, is_end ? 1u << pulled.position : 0u);
  } else {
    const std::uint32_t ranks = __reduce_or_sync(kFull, pulled.pulls ? 1u << pulled.rank : 0u);
    pulled.position = __popc(ranks & ((1u << (pulled.rank & 31)) - 1));
  }
  return pulled;
}

// A piece of a token's rows. A stage holds this piece of each of them.
struct Piece {
  std::uint32_t token;
  std::uint32_t offset;  // in a row, bytes
  std::uint32_t bytes;
};

// The order in which a warp takes pieces. A warp takes whole tokens if there are enough of them, else single
// pieces.
struct PieceOrder {
  std::uint32_t per_token;
  std::uint32_t run;  // consecutive pieces of a token that a warp takes
  std::uint32_t runs;
  std::uint32_t step;  // in runs
  std::uint32_t at;    // the current run
  std::uint32_t piece = 0;

  __device__ PieceOrder(const Operation& op, Cta cta) {
    const std::uint32_t row_bytes = op.shape.hidden * 2;
    per_token = (row_bytes + op.division.chunk_bytes - 1) / op.division.chunk_bytes;
    step = cta.count * op.division.warps;
    run = op.num_tokens >= 4 * step ? per_token : 1;
    runs = op.num_tokens * (per_token / run);
    at = cta.index + cta.count * warp_of();
  }
  __device__ bool done() const { return at >= runs; }
  __device__ void advance() {
    if (++piece != run) return;
    piece = 0;
    at += step;
  }
  __device__ std::uint32_t token_of(std::uint32_t i) const { return run == 1 ? i / per_token : i; }
  __device__ Piece now(const Operation& op) const {
    const std::uint32_t index = run == 1 ? at % per_token : piece;
    const std::uint32_t offset = index * op.division.chunk_bytes;
    return {token_of(at), offset, min(op.division.chunk_bytes, op.shape.hidden * 2 - offset)};
  }
};

// Returns the number of biases: 0, 1 or 2.
__device__ inline std::uint32_t num_biases(const Operation& op) {
  return op.bias[0] == nullptr ? 0 : op.bias[1] == nullptr ? 1 : 2;
}

// Loads a piece of all of the token's rows into a stage; the biases come last. All lanes of a warp call.
__device__ inline void load_piece(const Operation& op, const Stages& stages, StageHeader& header,
                                  std::uint32_t stage, const Piece& piece, const PulledRow& pulled) {
  const std::uint32_t biases = num_biases(op);
  EPD_BELOW(piece.token, op.num_tokens);
  EPD_AT_MOST(piece.offset + piece.bytes, op.shape.hidden * 2);
  EPD_AT_MOST(pulled.num_rows + biases, stage_pieces(op));
  if (pulled.pulls) EPD_BELOW(pulled.position, pulled.num_rows);
  if (pulled.pulls) EPD_BELOW(pulled.row, op.shape.recv_rows);
  if (lane_of() == 0) {
    header.num_rows = pulled.num_rows;
    header.ends = pulled.ends;
    barrier_expect(stages.barriers + stage, (pulled.num_rows + biases) * piece.bytes);
  }
  if (pulled.pulls) header.weight[pulled.position] = pulled.weight;
  __syncwarp();
  const std::size_t row_bytes = std::size_t{op.shape.hidden} * 2;
  const auto* y = reinterpret_cast<const std::uint8_t*>(op.peers[pulled.pulls ? pulled.rank : 0].source.y);
  warp_load(stages.at(stage) + pulled.position * op.division.chunk_bytes,
            y + (pulled.pulls ? pulled.row : 0) * row_bytes + piece.offset, piece.bytes, pulled.pulls,
            stages.barriers + stage);
  if (biases == 0) return;
  const bool mine = lane_of() < biases;
  const auto* bias = reinterpret_cast<const std::uint8_t*>(op.bias[mine ? lane_of() : 0]);
  warp_load(stages.at(stage) + (pulled.num_rows + lane_of()) * op.division.chunk_bytes,
            bias + piece.token * row_bytes + piece.offset, piece.bytes, mine, stages.barriers + stage);
}

// Returns the sum of one vector of 8 columns. A product by 1 is exact, so unweighted sums use the same code.
template <bool kPerExpert>
__device__ inline Eight sum_vector(const std::uint8_t* vector, const StageHeader& header,
                                   std::uint32_t biases, std::uint32_t pitch) {
  const auto at = [vector, pitch](std::uint32_t row) {
    return *reinterpret_cast<const uint4*>(vector + row * pitch);
  };
  Eight sum;
  sum.clear();
  for (std::uint32_t b = 0; b < biases; ++b) sum.add(at(header.num_rows + b), 1.0f);
  if constexpr (!kPerExpert) {
#pragma unroll 4
    for (std::uint32_t row = 0; row < header.num_rows; ++row) sum.add(at(row), header.weight[row]);
  } else {
    Eight partial;
    partial.clear();
#pragma unroll 4
    for (std::uint32_t row = 0; row < header.num_rows; ++row) {
      partial.add(at(row), header.weight[row]);
      if (((header.ends >> row) & 1) == 0) continue;
      sum.add(partial.rounded(), 1.0f);
      partial.clear();
    }
  }
  return sum;
}

// Adds up a loaded piece and stores it in `out`.
template <bool kPerExpert>
__device__ inline void sum_piece(const Operation& op, const std::uint8_t* stage, const StageHeader& header,
                                 const Piece& piece) {
  auto* const out = reinterpret_cast<uint4*>(reinterpret_cast<std::uint8_t*>(op.out) +
                                             std::size_t{piece.token} * op.shape.hidden * 2 + piece.offset);
  const std::uint32_t biases = num_biases(op);
  const std::uint32_t pitch = op.division.chunk_bytes;
  const std::uint32_t vectors = piece.bytes / 16;
  EPD_BELOW(piece.token, op.num_tokens);
  EPD_AT_MOST(header.num_rows + biases, stage_pieces(op));
#pragma unroll 2
  for (std::uint32_t i = lane_of(); i < vectors; i += 32) {
    out[i] = with_canonical_nans(sum_vector<kPerExpert>(stage + i * 16, header, biases, pitch).rounded());
  }
}

// Writes out_weights of a token: for each choice the sum of the weights that holders stored for it, by rank.
// Layout compact. All lanes of a warp call.
__device__ inline void sum_weights_of_ranks(const Operation& op, std::uint32_t token,
                                            const PulledRow& pulled) {
  const bool returns = pulled.row >= 0 && op.peers[pulled.rank].source.y_weights != nullptr;
  std::uint32_t ranks = __reduce_or_sync(kFull, returns ? 1u << pulled.rank : 0u);
  const auto count = static_cast<std::uint32_t>(__popc(ranks));
  float sum = 0.0f;
#pragma unroll 2
  for (std::uint32_t i = 0; i < count; ++i, ranks &= ranks - 1) {
    const auto rank = static_cast<std::uint32_t>(__ffs(static_cast<int>(ranks)) - 1);
    const std::uint32_t holder = __ballot_sync(kFull, returns && pulled.rank == rank);
    const std::size_t row =
        static_cast<std::uint32_t>(__shfl_sync(kFull, pulled.row, __ffs(static_cast<int>(holder)) - 1));
    EPD_BELOW(rank, op.shape.num_ranks);
    EPD_BELOW(row, op.shape.recv_rows);
    if (lane_of() >= op.shape.topk) continue;
    sum = __fadd_rn(sum, op.peers[rank].source.y_weights[row * op.shape.topk + lane_of()]);
  }
  if (lane_of() >= op.shape.topk) return;
  EPD_BELOW(token, op.num_tokens);
  op.out_weights[token * op.shape.topk + lane_of()] = sum == sum ? sum : __uint_as_float(0x7fc00000u);
}

// Writes out_weights of a token: for each choice the weight that the holder stored with the choice's row.
template <bool kPerExpert>
__device__ inline void return_weights(const Operation& op, std::uint32_t token, const RawChoice& raw,
                                      const PulledRow& pulled) {
  if (!kPerExpert && op.sum_weights) return sum_weights_of_ranks(op, token, pulled);
  const std::uint32_t key = kPerExpert ? static_cast<std::uint32_t>(raw.expert) : pulled.rank;
  const std::uint32_t carriers = __match_any_sync(kFull, key) & __ballot_sync(kFull, raw.row >= 0);
  const std::int32_t row =
      __shfl_sync(kFull, raw.row, carriers == 0 ? 0 : __ffs(static_cast<int>(carriers)) - 1);
  if (lane_of() >= op.shape.topk) return;
  float weight = 0.0f;
  if (raw.expert >= 0 && op.peers[pulled.rank].source.y_weights != nullptr) {
    const std::size_t first =
        kPerExpert ? row : std::size_t{static_cast<std::uint32_t>(row)} * op.shape.topk + lane_of();
    EPD_BELOW(row, op.shape.recv_rows);
    weight = op.peers[pulled.rank].source.y_weights[first];
  }
  EPD_BELOW(token, op.num_tokens);
  op.out_weights[token * op.shape.topk + lane_of()] = weight;
}

// The work of one copy warp. It loads `stages` pieces ahead of the sums.
template <bool kPerExpert>
__device__ inline void pull_rows(const Operation& op, Cta cta, const Shared& shared) {
  if (warp_of() >= op.division.warps) return;
  const Stages stages(op, shared);
  StageHeader* const headers = shared.headers + warp_of() * stages.count;
  stages.open(op);
  PieceOrder loading(op, cta);
  PieceOrder summing = loading;
  StageCursor load_at;
  StageCursor sum_at;
  PulledRow pulled;
  RawChoice next = load_raw(op, loading.token_of(loading.at));
  const auto load_next = [&] {
    if (loading.done()) return;
    const Piece piece = loading.now(op);
    if (loading.piece == 0) {
      pulled = resolve_row<kPerExpert>(op, next);
      if (op.out_weights != nullptr && piece.offset == 0)
        return_weights<kPerExpert>(op, piece.token, next, pulled);
      next = load_raw(op, loading.token_of(loading.at + loading.step));
    }
    load_piece(op, stages, headers[load_at.stage], load_at.stage, piece, pulled);
    loading.advance();
    load_at.advance(stages.count);
  };
  for (std::uint32_t i = 0; i < stages.count; ++i) load_next();
  for (; !summing.done(); summing.advance()) {
    barrier_wait(stages.barriers + sum_at.stage, sum_at.parity);
    __syncwarp();
    sum_piece<kPerExpert>(op, stages.at(sum_at.stage), headers[sum_at.stage], summing.now(op));
    sum_at.advance(stages.count);
    fence_async_shared();  // the sum has read the stage; a bulk copy writes it next
    __syncwarp();
    load_next();
  }
  stages.close();
}

// Runs one CTA's part of a high-throughput combine. `op` is the CTA's own copy.
template <bool kPerExpert>
__device__ inline void run_high_throughput_combine(Operation& op, Cta cta, std::uint8_t* memory) {
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(op, memory);
  if (cta.index == 0) announce(op);
  if (!wait_signals(op, op.peers[op.rank].ready, active_ranks(op), deadline_ns)) return;
  if (!check_announcements(op)) return;
  pull_rows<kPerExpert>(op, cta, shared);
  finish<true>(op, cta, deadline_ns, [] { return 0u; });
}

}  // namespace epd::kernels::cuda
