// Combine through landings: who holds a token's rows adds them up, so that one partial sum for each (token,
// rank) crosses the wire; the token's owner adds those up.
#pragma once

#include "cuda/combine.cuh"
#include "cuda/landing.cuh"

namespace epd::kernels::cuda {

// Rows that a warp adds up, in order of lanes. `row` and `weight` are of the lane.
struct Summands {
  std::uint32_t lanes;  // that have one
  const std::uint8_t* row;
  float weight;
};

// Some vectors of a row for each lane, in flight together.
struct VectorBatch {
  static constexpr std::uint32_t kSteps = 4;
  static constexpr std::uint32_t kVectors = kSteps * 32;
  uint4 v[kSteps];

  __device__ void load(const std::uint8_t* row, std::uint32_t first, std::uint32_t end) {
#pragma unroll
    for (std::uint32_t u = 0; u < kSteps; ++u) {
      const std::uint32_t i = first + u * 32 + lane_of();
      v[u] = i < end ? __ldcg(reinterpret_cast<const uint4*>(row) + i) : uint4{0, 0, 0, 0};
    }
  }
};

// Adds up vectors [begin, end) of the rows and hands each rounded one to store(i, vector). All lanes call.
template <typename Store>
__device__ inline void sum_rows(const Summands& rows, const std::uint8_t* const (&biases)[2], Range vectors,
                                Store store) {
  constexpr std::uint32_t kSteps = VectorBatch::kSteps;
  const auto address = reinterpret_cast<std::uintptr_t>(rows.row);
  const auto row_of = [address](std::uint32_t lanes) {
    return reinterpret_cast<const std::uint8_t*>(
        __shfl_sync(kFull, address, __ffs(static_cast<int>(lanes)) - 1));
  };
  for (std::uint32_t first = vectors.begin; first < vectors.end; first += VectorBatch::kVectors) {
    Eight sum[kSteps];
#pragma unroll
    for (Eight& s : sum) s.clear();
    VectorBatch now;
    if (rows.lanes != 0) now.load(row_of(rows.lanes), first, vectors.end);
    for (const std::uint8_t* const bias : biases) {
      if (bias == nullptr) continue;
      VectorBatch more;
      more.load(bias, first, vectors.end);
#pragma unroll
      for (std::uint32_t u = 0; u < kSteps; ++u) sum[u].add(more.v[u], 1.0f);
    }
    for (std::uint32_t left = rows.lanes; left != 0;) {
      const float weight = __shfl_sync(kFull, rows.weight, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      VectorBatch next = now;
      if (left != 0) next.load(row_of(left), first, vectors.end);
#pragma unroll
      for (std::uint32_t u = 0; u < kSteps; ++u) sum[u].add(now.v[u], weight);
      now = next;
    }
#pragma unroll
    for (std::uint32_t u = 0; u < kSteps; ++u) {
      const std::uint32_t i = first + u * 32 + lane_of();
      if (i < vectors.end) store(i, sum[u].rounded());
    }
  }
}

// Into how many pieces a row is cut so that a source's few tokens keep all warps busy. Holder and owner ask
// alike.
__device__ inline std::uint32_t pieces_of(const Operation& op, std::uint32_t num_tokens) {
  const std::uint32_t rows = num_tokens * op.shape.num_ranks;
  return rows <= 128 ? kLandingPieces : rows <= 256 ? 2 : 1;
}
__device__ inline Range piece_range(const Operation& op, std::uint32_t piece, std::uint32_t pieces) {
  return part_of(op.shape.hidden / 8, piece, pieces);
}

// A warp among all of an operation, neighbours on different SMs.
struct WarpOrder {
  std::uint32_t first;
  std::uint32_t step;
  __device__ explicit WarpOrder(Cta cta)
      : first(cta.index + cta.count * warp_of()), step(cta.count * (blockDim.x / 32)) {}
};

// The choice of lane k, if the token takes its row.
struct TakenRow {
  RawChoice raw;
  std::uint32_t rank = kFull;
  bool takes = false;

  __device__ TakenRow(const Operation& op, const RawChoice& choice) : raw(choice) {
    if (raw.expert >= 0) rank = raw.expert / experts_per_rank(op.shape);
    takes = raw.row >= 0 && op.peers[rank].source.y != nullptr;
  }
};

// Tells every rank which of its rows a token takes, with their weights; and gets the weights that come back.
__device__ inline void ask_for_sums(const Operation& op, std::uint32_t token, const RawChoice& raw) {
  const TakenRow taken(op, raw);
  float weight = 1.0f;
  if (op.topk_weights != nullptr)
    weight = sum_weights(op.shape.topk, static_cast<std::uint32_t>(raw.expert), raw.weight);
  for (std::uint32_t d = 0; d < op.shape.num_ranks; ++d) {
    if (!is_there(op, d) || lane_of() >= op.shape.topk) continue;
    const bool here = taken.takes && taken.rank == d;
    tell(told_choices(op, d, op.rank, token) + lane_of(), {here ? raw.row : -1, here ? weight : 0.0f});
  }
  __syncwarp();
  if (lane_of() < op.shape.num_ranks && is_there(op, lane_of()))
    store_release_system(asked_tag(op, lane_of(), op.rank, token), op.tag);
  if (op.out_weights == nullptr) return;
  PulledRow pulled;
  pulled.rank = taken.rank;
  return_weights<true>(op, token, raw, pulled);
}

// This rank's part of the sum of a token of `source`, to its slot there. False: the operation has failed.
__device__ inline bool send_sum(const Operation& op, std::uint32_t source, std::uint32_t token,
                                std::uint32_t piece, std::uint32_t pieces, std::uint64_t deadline_ns) {
  if (!wait_words(op, asked_tag(op, op.rank, source, token), lane_of() == 0, source, deadline_ns))
    return false;
  ToldChoice told{-1, 0.0f};
  if (lane_of() < op.shape.topk) told = read_told(told_choices(op, op.rank, source, token) + lane_of());
  const std::uint16_t* const y = op.peers[op.rank].source.y;
  const auto row = static_cast<std::uint32_t>(told.what);
  const bool holds = told.what >= 0 && row < op.shape.recv_rows && y != nullptr;
  const auto* const at =
      reinterpret_cast<const std::uint8_t*>(y + std::size_t{holds ? row : 0} * op.shape.hidden);
  const Summands rows{__ballot_sync(kFull, holds), at, told.weight};
  if (rows.lanes == 0) return true;
  auto* const slot = reinterpret_cast<uint4*>(landing_slot(op, source, op.rank, token));
  sum_rows(rows, {nullptr, nullptr}, piece_range(op, piece, pieces),
           [slot](std::uint32_t i, uint4 vector) { slot[i] = vector; });
  __syncwarp();
  if (lane_of() == 0) store_release_system(landed_tag(op, source, op.rank, token, piece), op.tag);
  return true;
}

// All of a warp's. The sources take turns, so that the links to all of them are busy.
__device__ inline bool send_sums(const Operation& op, const WarpOrder& order, std::uint64_t deadline_ns) {
  const std::uint32_t tokens = announced_tokens(op);  // of source `lane`
  const std::uint32_t pieces = pieces_of(op, tokens);
  const std::uint32_t most = __reduce_max_sync(kFull, tokens * pieces);
  const std::uint32_t ranks = op.shape.num_ranks;
  for (std::uint32_t i = order.first; i < most * ranks; i += order.step) {
    const std::uint32_t source = (i + op.rank) % ranks;
    const std::uint32_t cut = __shfl_sync(kFull, pieces, static_cast<int>(source));
    const std::uint32_t task = i / ranks;
    if (task >= __shfl_sync(kFull, tokens * pieces, static_cast<int>(source))) continue;
    if (!send_sum(op, source, task / cut, task % cut, cut, deadline_ns)) return false;
  }
  return true;
}

// A quarter of the sum of one of this rank's own tokens.
__device__ inline bool add_sums(const Operation& op, std::uint32_t token, std::uint32_t quarter,
                                std::uint64_t deadline_ns) {
  const TakenRow taken(op, load_raw(op, token));
  const std::uint32_t ranks = __reduce_or_sync(kFull, taken.takes ? 1u << taken.rank : 0u);
  const bool mine = ((ranks >> lane_of()) & 1) != 0;
  const std::uint32_t from = mine ? lane_of() : op.rank;
  const std::uint32_t piece = quarter * pieces_of(op, op.num_tokens) / kLandingPieces;
  if (!wait_words(op, landed_tag(op, op.rank, from, token, piece), mine, from, deadline_ns)) return false;
  const std::size_t row = std::size_t{token} * op.shape.hidden;
  const auto bias_of = [&op, row](std::uint32_t i) {
    return op.bias[i] == nullptr ? nullptr : reinterpret_cast<const std::uint8_t*>(op.bias[i] + row);
  };
  auto* const out = reinterpret_cast<uint4*>(op.out + row);
  const Summands sums{ranks, landing_slot(op, op.rank, from, token), 1.0f};
  sum_rows(sums, {bias_of(0), bias_of(1)}, piece_range(op, quarter, kLandingPieces),
           [out](std::uint32_t i, uint4 v) { out[i] = with_own_nans(v); });
  return true;
}

// One CTA's part of a combine through landings.
__device__ inline void run_landing_combine(const Operation& op, Cta cta) {
  __shared__ std::uint32_t sent;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const WarpOrder order(cta);
  if (threadIdx.x == 0) sent = 0;
  if (cta.index == 0) announce(op);
  RawChoice raw = load_raw(op, order.first);
  if (!wait_signals(op, op.peers[op.rank].ready, ranks_there(op), deadline_ns)) return;
  if (!check_announcements(op)) return;
  for (std::uint32_t token = order.first; token < op.num_tokens; token += order.step) {
    ask_for_sums(op, token, raw);
    raw = load_raw(op, token + order.step);
  }
  bool good = send_sums(op, order, deadline_ns);
  if (good) tell_others(op, cta, sent, blockDim.x / 32);
  for (std::uint32_t i = order.first; good && i < op.num_tokens * kLandingPieces; i += order.step) {
    good = add_sums(op, i / kLandingPieces, i % kLandingPieces, deadline_ns);
  }
  if (__syncthreads_or(!good) != 0) return;
  finish(
      op, cta, deadline_ns, [] { return 0u; }, true);
}

// One CTA's part of a combine. `op` is the CTA's own copy.
template <bool kPerExpert>
__device__ inline void run_combine(const Operation& op, Cta cta, std::uint8_t* memory) {
  if (kPerExpert && op.landing.max_tokens != 0) {
    run_landing_combine(op, cta);
  } else {
    run_pulling_combine<kPerExpert>(op, cta, memory);
  }
}

}  // namespace epd::kernels::cuda
