// Combine through landings: who holds a token's rows adds them up, so that one partial sum for each (token,
// rank) crosses the wire; the token's owner adds those up.
#pragma once

#include "cuda/combine.cuh"
#include "cuda/landing.cuh"

namespace epd::kernels::cuda {

// Rows that a warp adds up, in order of lanes.
struct Summands {
  std::uint32_t lanes;      // that have one
  const std::uint8_t* row;  // of the lane
  float weight;             // likewise
};

// Rows of a warp that are added up: parts of them come to its stages by bulk loads.
class Adder {
 public:
  // Vectors [at, end) of the rows.
  struct Job {
    Summands rows{};
    std::uint32_t at = 0;
    std::uint32_t loading = 0;
    std::uint32_t end = 0;
    std::uint32_t part = 1;  // vectors of each row that a stage takes
    std::uint32_t count = 0;
    float* weights = nullptr;  // in order of lanes
  };

  __device__ Adder(const Operation& op, const Shared& shared)
      : stages_(op, shared), headers_(shared.headers + warp_of() * stages_.count) {}
  __device__ void open() const { stages_.open(); }
  __device__ void close() const { stages_.close(); }

  // At most two at a time.
  __device__ Job job(const Summands& rows, Range vectors) {
    Job job;
    job.rows = rows;
    job.at = job.loading = vectors.begin;
    job.end = vectors.end;
    job.count = __popc(rows.lanes);
    const std::uint32_t most = stages_.bytes / 16 / max(job.count, 1u);
    const std::uint32_t all = vectors.end - vectors.begin;
    job.part = most >= all ? max(all, 1u) : most >= 32 ? most / 32 * 32 : most;
    job.weights = headers_[next_header_].weight;
    next_header_ ^= 1;
    if (((rows.lanes >> lane_of()) & 1) != 0) job.weights[position(rows)] = rows.weight;
    __syncwarp();
    return job;
  }

  // Adds the rows up, and the biases before them; each rounded vector goes to store(i, vector). Meanwhile
  // `next` comes.
  template <typename Store>
  __device__ void add(Job& now, Job& next, const std::uint8_t* const (&biases)[2], Store store) {
    load(now);
    load(next);
    for (; now.at < now.end; now.at += now.part) {
      if (now.count != 0) {
        barrier_wait(stages_.barriers + at_.stage, at_.parity);
        __syncwarp();
      }
      add_part(now, biases, store);
      if (now.count == 0) continue;
      at_.advance(stages_.count);
      --on_their_way_;
      fence_async_shared();
      __syncwarp();
      load(now);
      load(next);
    }
  }
  // What is on its way lands before the warp leaves.
  __device__ void drain() {
    for (; on_their_way_ != 0; --on_their_way_) {
      barrier_wait(stages_.barriers + at_.stage, at_.parity);
      at_.advance(stages_.count);
    }
  }

 private:
  __device__ static std::uint32_t position(const Summands& rows) {
    return __popc(rows.lanes & lanes_below());
  }

  // As many parts as there is room for.
  __device__ void load(Job& job) {
    for (; on_their_way_ < stages_.count && job.count != 0 && job.loading < job.end; ++on_their_way_) {
      const std::uint32_t bytes = min(job.part, job.end - job.loading) * 16;
      std::uint64_t* const barrier = stages_.barriers + load_at_.stage;
      if (lane_of() == 0) barrier_expect(barrier, bytes * job.count);
      __syncwarp();
      warp_load(stages_.at(load_at_.stage) + position(job.rows) * job.part * 16,
                job.rows.row + job.loading * 16, bytes, ((job.rows.lanes >> lane_of()) & 1) != 0, barrier);
      job.loading += job.part;
      load_at_.advance(stages_.count);
    }
  }

  template <typename Store>
  __device__ void add_part(const Job& job, const std::uint8_t* const (&biases)[2], Store store) const {
    const auto* const stage = reinterpret_cast<const uint4*>(stages_.at(at_.stage));
    const std::uint32_t end = min(job.at + job.part, job.end);
#pragma unroll 2
    for (std::uint32_t i = job.at + lane_of(); i < end; i += 32) {
      Eight sum;
      sum.clear();
      for (const std::uint8_t* const bias : biases) {
        if (bias != nullptr) sum.add(__ldcg(reinterpret_cast<const uint4*>(bias) + i), 1.0f);
      }
#pragma unroll 4
      for (std::uint32_t row = 0; row < job.count; ++row)
        sum.add(stage[row * job.part + i - job.at], job.weights[row]);
      store(i, sum.rounded());
    }
  }

  const Stages stages_;
  StageHeader* const headers_;
  std::uint32_t next_header_ = 0;
  std::uint32_t on_their_way_ = 0;
  StageCursor load_at_;
  StageCursor at_;
};

// Rows are cut into pieces, so that tokens of many rows keep no warp longer than others. Own tokens' sums,
// whose end everybody waits for, into smaller ones: their summands come in one round trip.
__device__ inline Range piece_range(const Operation& op, std::uint32_t piece) {
  return part_of(op.shape.hidden / 8, piece, kLandingPieces);
}
inline constexpr std::uint32_t kOwnParts = 2;  // of a piece
inline constexpr std::uint32_t kOwnPieces = kOwnParts * kLandingPieces;
__device__ inline Range own_piece_range(const Operation& op, std::uint32_t piece) {
  const Range whole = piece_range(op, piece / kOwnParts);
  const Range part = part_of(whole.end - whole.begin, piece % kOwnParts, kOwnParts);
  return {whole.begin + part.begin, whole.begin + part.end};
}

// A warp among all of an operation, neighbours on different SMs.
struct WarpOrder {
  std::uint32_t first;
  std::uint32_t step;
  __device__ WarpOrder(const Operation& op, Cta cta)
      : first(cta.index + cta.count * warp_of()), step(cta.count * op.movers.warps) {}
};

// The choice of lane k, if the token takes its row.
struct TakenRow {
  std::uint32_t rank = kFull;
  bool takes = false;

  __device__ TakenRow(const Operation& op, const RawChoice& raw) {
    if (raw.expert >= 0) rank = raw.expert / experts_per_rank(op.shape);
    takes = raw.row >= 0 && op.peers[rank].source.y != nullptr;
  }
};

// Tells every rank which of its rows a token takes, with their weights.
__device__ inline void ask_for_sums(const Operation& op, std::uint32_t token, const RawChoice& raw) {
  const TakenRow taken(op, raw);
  float weight = 1.0f;
  if (op.topk_weights != nullptr)
    weight = sum_weights(op.shape.topk, static_cast<std::uint32_t>(raw.expert), raw.weight);
  if (lane_of() >= op.shape.topk) return;
  const std::uint64_t row =
      std::uint64_t{__float_as_uint(weight)} << 32 | static_cast<std::uint32_t>(raw.row);
  for (std::uint32_t d = 0; d < op.shape.num_ranks; ++d) {
    if (!is_there(op, d)) continue;
    tell(asked_words(op, d, op.rank, token) + lane_of(), op.tag,
         taken.takes && taken.rank == d ? row : kFull);
  }
}

// A piece of this rank's part of the sum of a token of another.
struct SumTask {
  std::uint32_t source = 0;
  std::uint32_t token = kFull;  // kFull: none
  std::uint32_t piece = 0;
  ToldWord word{};  // of choice `lane`, if it was there already

  SumTask() = default;
  // Number i. Neighbours begin with different sources, so that the links to all of them are busy.
  __device__ SumTask(const Operation& op, const std::uint32_t* tokens, std::uint32_t i) {
    const std::uint32_t ranks = op.shape.num_ranks;
    const std::uint32_t task = i / ranks;
    source = (i + task / 8 + op.rank) % ranks;
    if (task >= tokens[source] * kLandingPieces) return;
    token = task / kLandingPieces;
    piece = task % kLandingPieces;
    if (lane_of() < op.shape.topk) word = look(at(op));
  }
  __device__ const ToldWord* at(const Operation& op) const {
    return asked_words(op, op.rank, source, token) + min(lane_of(), op.shape.topk - 1);
  }
};

// Tags that a warp releases together: a release waits for all that is on its way.
struct SumTags {
  static constexpr std::uint32_t kMost = 8;
  std::uint64_t* tag = nullptr;  // of lane i: the i-th
  std::uint32_t count = 0;

  __device__ void add(const Operation& op, std::uint64_t* at) {
    if (lane_of() == count) tag = at;
    if (++count == kMost) release(op);
  }
  __device__ void release(const Operation& op) {
    __syncwarp();
    if (lane_of() < count) store_release_system(tag, op.tag);
    count = 0;
  }
};

// What the source has asked for, of this rank's rows.
__device__ inline Summands asked_rows(const Operation& op, std::uint64_t asked) {
  const std::uint16_t* const y = op.peers[op.rank].source.y;
  const auto row = static_cast<std::uint32_t>(asked);
  const bool holds = row < op.shape.recv_rows && row != kFull && y != nullptr;
  return {__ballot_sync(kFull, holds),
          reinterpret_cast<const std::uint8_t*>(y + std::size_t{holds ? row : 0} * op.shape.hidden),
          __uint_as_float(static_cast<std::uint32_t>(asked >> 32))};
}

// As warps get free. False: the operation has failed.
__device__ inline bool send_sums(const Operation& op, Cta cta, Adder& adder, LandingBoard& board,
                                 std::uint64_t deadline_ns) {
  std::uint32_t most = 0;
#pragma unroll 1
  for (std::uint32_t s = 0; s < op.shape.num_ranks; ++s) most = max(most, board.tokens[s]);
  const std::uint32_t end = most * kLandingPieces * op.shape.num_ranks;
  const bool has = lane_of() < op.shape.topk;
  SumTags tags;
  SumTask task;  // none
  Adder::Job now;
#pragma unroll 1
  for (bool more = true; more;) {
    const std::uint32_t i = claim(cta, board.claimed);
    more = i < end;
    const SumTask next_task = more ? SumTask(op, board.tokens, i) : SumTask();
    Adder::Job next;
    std::uint64_t asked = has && next_task.token != kFull ? next_task.word.value : kFull;
    const bool late = has && next_task.token != kFull && next_task.word.tag != op.tag;
    const bool waits = __any_sync(kFull, late) != 0;
    if (!waits) next = adder.job(asked_rows(op, asked), piece_range(op, next_task.piece));
    if (now.count != 0) {
      auto* const slot = reinterpret_cast<uint4*>(landing_slot(op, task.source, op.rank, task.token));
      adder.add(now, next, {nullptr, nullptr}, [slot](std::uint32_t v, uint4 vector) { slot[v] = vector; });
      tags.add(op, landed_tag(op, task.source, op.rank, task.token, task.piece));
    }
    if (waits) {
      tags.release(op);
      if (!wait_told(op, next_task.at(op), late, next_task.source, deadline_ns, asked)) return false;
      next = adder.job(asked_rows(op, asked), piece_range(op, next_task.piece));
    }
    now = next;
    task = next_task;
  }
  tags.release(op);
  return true;
}

// A piece of the sum of one of this rank's own tokens.
__device__ inline bool add_sums(const Operation& op, Adder& adder, std::uint32_t token, std::uint32_t piece,
                                const RawChoice& raw, std::uint64_t deadline_ns) {
  const TakenRow taken(op, raw);
  const std::uint32_t ranks = __reduce_or_sync(kFull, taken.takes ? 1u << taken.rank : 0u);
  const bool mine = ((ranks >> lane_of()) & 1) != 0;
  const std::uint32_t from = mine ? lane_of() : op.rank;
  if (!wait_words(op, landed_tag(op, op.rank, from, token, piece / kOwnParts), mine, from, deadline_ns))
    return false;
  fence_async();
  __syncwarp();
  const std::size_t row = std::size_t{token} * op.shape.hidden;
  const auto bias_of = [&op, row](std::uint32_t i) {
    return op.bias[i] == nullptr ? nullptr : reinterpret_cast<const std::uint8_t*>(op.bias[i] + row);
  };
  auto* const out = reinterpret_cast<uint4*>(op.out + row);
  Adder::Job job =
      adder.job({ranks, landing_slot(op, op.rank, from, token), 1.0f}, own_piece_range(op, piece));
  Adder::Job none;
  adder.add(job, none, {bias_of(0), bias_of(1)},
            [out](std::uint32_t i, uint4 v) { out[i] = with_own_nans(v); });
  return true;
}

// The weights that come back.
__device__ inline void return_all_weights(const Operation& op, const WarpOrder& order) {
  for (std::uint32_t token = order.first; token < op.num_tokens; token += order.step) {
    const RawChoice raw = load_raw(op, token);
    PulledRow pulled;
    pulled.rank = TakenRow(op, raw).rank;
    return_weights<true>(op, token, raw, pulled);
  }
}

// A moving warp's part. False: the operation has failed.
__device__ inline bool combine_landing(const Operation& op, Cta cta, const Shared& shared,
                                       LandingBoard& board, std::uint64_t deadline_ns) {
  const WarpOrder order(op, cta);
  Adder adder(op, shared);
  adder.open();
  const std::uint32_t pieces = op.num_tokens * kOwnPieces;
  bool good = send_sums(op, cta, adder, board, deadline_ns);
  std::uint32_t i = claim(cta, board.own_claimed);
  RawChoice raw = load_raw(op, i / kOwnPieces);
  if (good && op.out_weights != nullptr) return_all_weights(op, order);
  if (good) tell_others(op, cta, board, op.movers.warps + (cta.index == 0));
#pragma unroll 1
  while (good && i < pieces) {
    const std::uint32_t next = claim(cta, board.own_claimed);
    const RawChoice next_raw = load_raw(op, next / kOwnPieces);
    good = add_sums(op, adder, i / kOwnPieces, i % kOwnPieces, raw, deadline_ns);
    i = next;
    raw = next_raw;
  }
  adder.drain();
  adder.close();
  return good;
}

// One CTA's part of a combine through landings.
__device__ __noinline__ inline void run_landing_combine(const Operation& op, Cta cta, std::uint8_t* memory) {
  __shared__ LandingBoard board;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(Kind::kCombine, op, memory);
  const WarpOrder order(op, cta);
  const bool moves = warp_of() < op.movers.warps;
  clear_board(board);
  __syncthreads();
  bool good = true;
  if (warp_of() == herald_warp()) {
    if (cta.index == 0) good = herald(op, cta, board, op.movers.warps + 1, deadline_ns);
  } else {
    if (cta.index == 0 && warp_of() == 0) say_hello(op);
    // What was told here before has been read: who reads it has not let the operation before end.
    for (std::uint32_t token = order.first; moves && token < op.num_tokens; token += order.step) {
      ask_for_sums(op, token, load_raw(op, token));
    }
    good = wait_hello(op, board, deadline_ns);
    if (good && moves) good = combine_landing(op, cta, shared, board, deadline_ns);
  }
  if (__syncthreads_or(!good) != 0) return;
  finish(
      op, cta, deadline_ns, [] { return 0u; }, true);
}

// One CTA's part of a combine. `op` is the CTA's own copy.
template <bool kPerExpert>
__device__ inline void run_combine(const Operation& op, Cta cta, std::uint8_t* memory) {
  if (kPerExpert && op.landing.max_tokens != 0) {
    run_landing_combine(op, cta, memory);
  } else {
    run_pulling_combine<kPerExpert>(op, cta, memory);
  }
}

}  // namespace epd::kernels::cuda
