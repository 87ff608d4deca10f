// Counts the client's choices. The result is the counts at every rank and, for each choice, its number among
// the rows that this CTA sends to the same target. A target is a rank (layout compact) or an expert (packed,
// expert).
#pragma once

#include "cuda/common/shared.cuh"
#include "cuda/common/signal.cuh"

namespace epd::kernels::cuda {

// The counters of a CTA in shared memory. Each counting warp counts its own tokens, in order.
struct Counters {
  std::uint32_t warps;  // counting warps
  std::uint32_t targets;
  std::uint32_t* of_warp;  // [warps,targets] rows
  std::uint32_t* ranks;    // [R] per-expert layouts: tokens sent to the rank
  std::uint32_t* experts;  // [E] compact: selections of the expert

  __device__ Counters(const Operation& op, const Shared& shared) : targets(num_targets(op.shape)) {
    warps = shared.counting_warps;
    ranks = shared.scratch;
    experts = ranks + op.shape.num_ranks;
    of_warp = experts + op.shape.num_experts;
  }
  __device__ std::uint32_t words() const {
    return static_cast<std::uint32_t>(of_warp - ranks) + warps * targets;
  }
};

// How a warp's lanes map to choices: a token has `width` lanes, and its K choices use the first K of them.
struct ChoiceLanes {
  std::uint32_t width;
  std::uint32_t k;
  std::uint32_t token;  // number among the tokens that the warp handles at once
  std::uint32_t group;  // the lanes of the same token

  __device__ explicit ChoiceLanes(std::uint32_t topk) {
    width = topk == 1 ? 1 : 1u << (32 - __clz(static_cast<int>(topk - 1)));
    k = lane_of() % width;
    token = lane_of() / width;
    group = (width == 32 ? kFull : (1u << width) - 1) << (lane_of() - k);
  }
  __device__ std::uint32_t tokens() const { return 32 / width; }
};

// Returns the rank of an expert.
__device__ inline std::uint32_t rank_of_expert(const Shape& shape, std::uint32_t expert) {
  return expert / shape.experts_per_rank_divisor;
}

// Reads the choice at `place` once. The client may change the memory at the same time.
__device__ inline std::int64_t read_choice(const Operation& op, std::uint32_t place) {
  EPD_BELOW(place, op.num_tokens * op.shape.topk);
  if (op.shape.index64) return static_cast<const volatile std::int64_t*>(op.topk_idx)[place];
  return static_cast<const volatile std::int32_t*>(op.topk_idx)[place];
}

// Every lane needs these while it counts.
struct Counting {
  const Operation& op;
  const Counters& counters;
  ChoiceLanes lanes;
  std::uint32_t active;  // set of active ranks

  __device__ Counting(const Operation& operation, const Counters& all)
      : op(operation), counters(all), lanes(op.shape.topk), active(active_ranks(op)) {}

  __device__ std::uint32_t target_of(std::int32_t expert) const {
    const auto e = static_cast<std::uint32_t>(expert);
    return op.shape.per_expert ? e : rank_of_expert(op.shape, e);
  }
  __device__ std::uint32_t& counter(std::uint32_t target) const {
    EPD_BELOW(warp_of(), counters.warps);
    EPD_BELOW(target, counters.targets);
    return counters.of_warp[warp_of() * counters.targets + target];
  }

  // Returns the choice as it counts. The result is -1 for no choice, for an inactive rank and for an invalid
  // value. An invalid value is also recorded in workspace().bad_choice.
  __device__ std::int32_t accept(std::uint32_t place, std::int64_t value) const {
    if (value < 0) return -1;
    if (value >= op.shape.num_experts) {
      const std::int64_t bounded = min(value, std::int64_t{INT32_MAX});
      const std::uint64_t key = std::uint64_t{place} << 32 | static_cast<std::uint32_t>(bounded);
      atomicMax(reinterpret_cast<unsigned long long*>(&workspace(op).bad_choice), ~key);
      return -1;
    }
    if (((active >> rank_of_expert(op.shape, static_cast<std::uint32_t>(value))) & 1) == 0) {
      atomicAdd(&workspace(op).dropped, 1);
      return -1;
    }
    return static_cast<std::int32_t>(value);
  }

  // Counts the choices of one step of a warp. Each lane gets its row's number among the warp's rows for the
  // same target. It gets -1 if a lower k of the same token already sends that row.
  __device__ std::int32_t number(std::int32_t expert) const {
    EPD_BELOW_OR_NONE(expert, op.shape.num_experts);
    const bool chosen = expert >= 0;
    const std::uint32_t target = chosen ? target_of(expert) : kFull;
    const std::uint32_t same = __match_any_sync(kFull, target);
    const bool sends = chosen && (same & lanes.group & lanes_below()) == 0;
    const std::uint32_t senders = same & __ballot_sync(kFull, sends);
    if (op.shape.per_expert) {
      const std::uint32_t rank = chosen ? rank_of_expert(op.shape, expert) : kFull;
      EPD_BELOW_OR_NONE(rank, op.shape.num_ranks);
      const std::uint32_t same_rank = __match_any_sync(kFull, rank);
      if (chosen && (same_rank & lanes.group & lanes_below()) == 0) atomicAdd(&counters.ranks[rank], 1);
    } else if (chosen) {
      atomicAdd(&counters.experts[expert], 1);
    }
    const std::uint32_t before = sends ? counter(target) + __popc(senders & lanes_below()) : 0;
    __syncwarp();
    if (sends && (senders & lanes_below()) == 0) counter(target) = before + __popc(senders);
    __syncwarp();
    return sends ? static_cast<std::int32_t>(before) : -1;
  }
};

// kSteps steps of a warp; their loads are in flight together. `begin` and `end` bound the warp's tokens.
struct ChoiceBatch {
  static constexpr std::uint32_t kSteps = 4;
  std::int32_t expert[kSteps];
  std::int32_t row[kSteps];  // number among the warp's rows for the same target
  std::uint32_t begin;
  std::uint32_t end;

  __device__ static std::uint32_t tokens(const Counting& counting) {
    return kSteps * counting.lanes.tokens();
  }
  __device__ std::uint32_t token(const Counting& c, std::uint32_t step) const {
    return begin + step * c.lanes.tokens() + c.lanes.token;
  }
  __device__ bool valid(const Counting& c, std::uint32_t step) const {
    return c.lanes.k < c.op.shape.topk && token(c, step) < end;
  }
  __device__ std::uint32_t place(const Counting& c, std::uint32_t step) const {
    return token(c, step) * c.op.shape.topk + c.lanes.k;
  }

  // Reads, checks and numbers the batch's choices.
  __device__ void read(const Counting& c) {
    std::int64_t value[kSteps];
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps; ++i) value[i] = valid(c, i) ? read_choice(c.op, place(c, i)) : -1;
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps; ++i) {
      expert[i] = row[i] = -1;
      if (begin + i * c.lanes.tokens() >= end) continue;  // true for all lanes or none
      expert[i] = c.accept(place(c, i), value[i]);
      row[i] = c.number(expert[i]);
    }
  }
  // Reads back what store() has written.
  __device__ void read_again(const Counting& c) {
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps; ++i) {
      expert[i] = valid(c, i) ? c.op.routing.topk[place(c, i)] : -1;
      row[i] = valid(c, i) ? c.op.routing.rows[place(c, i)] : -1;
      if (row[i] < -1) row[i] = -2 - row[i];
      EPD_BELOW_OR_NONE(expert[i], c.op.shape.num_experts);
    }
  }
  // Turns numbers among the warp's rows into numbers among the CTA's rows. The counters hold each warp's
  // first number.
  __device__ void add_lower_warps(const Counting& c) {
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps; ++i) {
      if (row[i] >= 0) row[i] += static_cast<std::int32_t>(c.counter(c.target_of(expert[i])));
    }
  }
  // Stores choices and numbers in the routing. Number i is stored as -2 - i.
  __device__ void store(const Counting& c) const {
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps; ++i) {
      if (!valid(c, i)) continue;
      EPD_BELOW(place(c, i), c.op.num_tokens * c.op.shape.topk);
      c.op.routing.topk[place(c, i)] = expert[i];
      c.op.routing.rows[place(c, i)] = row[i] < 0 ? -1 : -2 - row[i];
    }
  }
};

// Adds the warps' counters up into the workspace. Afterwards each counter holds its warp's first number.
__device__ inline void sum_warps(const Operation& op, const Counters& counters, Cta cta) {
  std::uint32_t* const rank_totals = totals(op);
  std::uint32_t* const expert_totals = rank_totals + op.shape.num_ranks;
  std::uint32_t* const target_totals = op.shape.per_expert ? expert_totals : rank_totals;
#pragma unroll 1
  for (std::uint32_t target = threadIdx.x; target < counters.targets; target += blockDim.x) {
    std::uint32_t sum = 0;
#pragma unroll 1
    for (std::uint32_t warp = 0; warp < counters.warps; ++warp) {
      std::uint32_t& counter = counters.of_warp[warp * counters.targets + target];
      const std::uint32_t count = counter;
      counter = sum;
      sum += count;
    }
    EPD_BELOW(cta.index * counters.targets + target, num_cta_counts(op));
    cta_counts(op)[cta.index * counters.targets + target] = sum;
    if (sum != 0) atomicAdd(&target_totals[target], sum);
  }
  const std::uint32_t others = op.shape.per_expert ? op.shape.num_ranks : op.shape.num_experts;
  const std::uint32_t* const other = op.shape.per_expert ? counters.ranks : counters.experts;
  std::uint32_t* const other_totals = op.shape.per_expert ? rank_totals : expert_totals;
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < others; i += blockDim.x) {
    if (other[i] != 0) atomicAdd(&other_totals[i], other[i]);
  }
}

// Checks all counted choices. Returns false if one of them is invalid; the operation has failed then.
__device__ inline bool check_choices(const Operation& op) {
  const std::uint64_t bad = load_relaxed(&workspace(op).bad_choice);
  if (bad == 0) return true;
  if (threadIdx.x == 0) {
    OpResult ending = ended(OpError::kBadChoice, static_cast<std::int32_t>(op.rank));
    const auto place = static_cast<std::uint32_t>(~bad >> 32);
    ending.token = place / op.shape.topk;
    ending.k = place % op.shape.topk;
    ending.value = static_cast<std::int32_t>(static_cast<std::uint32_t>(~bad));
    fail(op, ending);
  }
  return false;
}

// Sends the rank's counts to every active rank and clears them.
__device__ inline void send_counts(const Operation& op) {
  const std::uint32_t ranks = op.shape.num_ranks;
  const std::uint32_t experts = op.shape.num_experts;
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < ranks + experts; i += blockDim.x) {
    const std::uint32_t count = __ldcg(totals(op) + i);
    totals(op)[i] = 0;
    const bool is_rank = i < ranks;
    const std::uint32_t only =
        is_rank || op.shape.per_expert ? ranks : (i - ranks) / experts_per_rank(op.shape);
#pragma unroll 1
    for (std::uint32_t d = 0; d < ranks; ++d) {
      if (!is_active(op, d) || (only != ranks && only != d)) continue;
      EPD_BELOW(op.rank, ranks);
      if (is_rank) {
        op.peers[d].rank_counts[op.rank * ranks + i] = count;
      } else {
        op.peers[d].expert_counts[op.rank * experts + i - ranks] = count;
      }
    }
  }
}

// Reads, checks and counts the CTA's choices. Afterwards routing.rows holds numbers within the CTA as -2 - i.
// A reader can tell such a number from a place, so places can replace numbers one by one. A warp with only
// one batch keeps the batch in registers.
__device__ inline void number_rows(const Operation& op, Cta cta, const Counters& counters) {
  EPD_AT_MOST(counters.words(), scratch_words(op));
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < counters.words(); i += blockDim.x) counters.ranks[i] = 0;
  const Counting counting(op, counters);
  const Range tokens = part_of(op.num_tokens, cta.index, cta.count);
  const Range part = part_of(tokens.end - tokens.begin, min(warp_of(), counters.warps), counters.warps);
  const std::uint32_t begin = tokens.begin + part.begin;
  const std::uint32_t end = warp_of() < counters.warps ? tokens.begin + part.end : begin;
  const std::uint32_t step = ChoiceBatch::tokens(counting);
  ChoiceBatch batch;
  batch.end = end;
  __syncthreads();
#pragma unroll 1
  for (batch.begin = begin; batch.begin < end; batch.begin += step) {
    batch.read(counting);
    if (end - begin > step) batch.store(counting);
  }
  __syncthreads();
  sum_warps(op, counters, cta);
  __syncthreads();
#pragma unroll 1
  for (batch.begin = begin; batch.begin < end; batch.begin += step) {
    if (end - begin > step) batch.read_again(counting);
    batch.add_lower_warps(counting);
    batch.store(counting);
  }
}

// Counts the CTA's tokens. The last CTA to finish sends the counts and the announcement to all ranks. Returns
// false if the operation has failed.
__device__ inline bool count_choices(const Operation& op, Cta cta, const Shared& shared) {
  __shared__ bool last;
  number_rows(op, cta, Counters(op, shared));
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(&workspace(op).counted, cta.count - 1) == cta.count - 1;
  __syncthreads();
  if (!last) return true;
  if (!check_choices(op)) return false;
  send_counts(op);
  announce(op);
  return true;
}

// Sets `base` to the rows that lower CTAs send: in layout compact for each CTA, else for this CTA. All CTAs'
// counts must be visible.
__device__ inline void sum_lower_ctas(const Operation& op, Cta cta, const Shared& shared) {
  const std::uint32_t targets = num_targets(op.shape);
  if (!op.shape.per_expert) {
#pragma unroll 1
    for (std::uint32_t target = warp_of(); target < targets; target += blockDim.x / 32) {
      std::uint32_t lower = 0;
#pragma unroll 1
      for (std::uint32_t first = 0; first < cta.count; first += 32) {
        const std::uint32_t c = first + lane_of();
        const std::uint32_t count = c < cta.count ? __ldcg(cta_counts(op) + c * targets + target) : 0;
        const std::uint32_t sum = sum_lanes_up_to(count);
        if (c < cta.count) EPD_BELOW(c * targets + target, min(base_words(op), num_cta_counts(op)));
        if (c < cta.count) shared.base[c * targets + target] = lower + sum - count;
        lower += __shfl_sync(kFull, sum, 31);
      }
    }
    return;
  }
#pragma unroll 1
  for (std::uint32_t target = threadIdx.x; target < targets; target += blockDim.x) {
    std::uint32_t sum = 0;
#pragma unroll 8
    for (std::uint32_t c = 0; c < cta.index; ++c) sum += __ldcg(cta_counts(op) + c * targets + target);
    EPD_BELOW(target, base_words(op));
    shared.base[target] = sum;
  }
}

// Invalidates the routing record before a dispatch overwrites it. If the engine dies in between, nobody takes
// the record for a routing. One thread calls; the record is overwritten by threads that have synchronised
// with it.
__device__ inline void invalidate_record(const Operation& op) {
  if (op.routing.head == nullptr) return;
  *static_cast<volatile std::uint64_t*>(&op.routing.head->handle) = 0;
  fence_device();
}

}  // namespace epd::kernels::cuda
