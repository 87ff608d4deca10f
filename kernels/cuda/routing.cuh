// From the client's choices to counts at every rank and, for each choice, its number among the rows that
// this CTA sends to the same target. A target is a rank (compact) or an expert (packed, expert).
#pragma once

#include "cuda/shared.cuh"
#include "cuda/signal.cuh"

namespace epd::kernels::cuda {

// Each counting warp counts tokens of its own, in order.
struct Counters {
  std::uint32_t warps;  // that count
  std::uint32_t targets;
  std::uint32_t* of_warp;  // [warps,targets]
  std::uint32_t* ranks;    // [R] per-expert layouts: tokens that go there
  std::uint32_t* experts;  // [E] compact: selections

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

// How lanes are given to choices: `width` lanes for a token, the first K of them used.
struct ChoiceLanes {
  std::uint32_t width;
  std::uint32_t k;
  std::uint32_t token;  // of the tokens that the warp takes at once
  std::uint32_t group;  // lanes of the same token

  __device__ explicit ChoiceLanes(std::uint32_t topk) {
    width = topk == 1 ? 1 : 1u << (32 - __clz(static_cast<int>(topk - 1)));
    k = lane_of() % width;
    token = lane_of() / width;
    group = (width == 32 ? kFull : (1u << width) - 1) << (lane_of() - k);
  }
  __device__ std::uint32_t tokens() const { return 32 / width; }
};

// The value at `place`, read once from memory that the client may be changing.
__device__ inline std::int64_t read_choice(const Operation& op, std::uint32_t place) {
  if (op.shape.index64) return static_cast<const volatile std::int64_t*>(op.topk_idx)[place];
  return static_cast<const volatile std::int32_t*>(op.topk_idx)[place];
}

// The choice as it counts: -1 for none, for ranks that are not there, and for what is refused.
__device__ inline std::int32_t accept_choice(const Operation& op, std::uint32_t place, std::int64_t value) {
  if (value < -1 || value >= op.shape.num_experts) {
    const auto saturated = static_cast<std::int32_t>(max(min(value, std::int64_t{INT32_MAX}), std::int64_t{INT32_MIN}));
    const std::uint64_t key = std::uint64_t{place} << 32 | static_cast<std::uint32_t>(saturated);
    atomicMax(reinterpret_cast<unsigned long long*>(&workspace(op).bad_choice), ~key);
    return -1;
  }
  if (value >= 0 && !is_there(op, static_cast<std::uint32_t>(value) / experts_per_rank(op.shape))) {
    atomicAdd(&workspace(op).dropped, 1);
    return -1;
  }
  return static_cast<std::int32_t>(value);
}

// One step of a warp: each lane's choice gets its number among the warp's rows for the same target, or -1 if
// a lower k of the token sends that row already.
__device__ inline std::int32_t number_choice(const Operation& op, const Counters& counters,
                                             const ChoiceLanes& lanes, std::int32_t expert) {
  const bool chosen = expert >= 0;
  const std::uint32_t rank = chosen ? expert / experts_per_rank(op.shape) : kFull;
  const std::uint32_t target = op.shape.per_expert ? static_cast<std::uint32_t>(expert) : rank;
  const std::uint32_t same = __match_any_sync(kFull, target);
  const bool sends = chosen && (same & lanes.group & lanes_below()) == 0;
  const std::uint32_t senders = same & __ballot_sync(kFull, sends);
  if (op.shape.per_expert) {
    const std::uint32_t same_rank = __match_any_sync(kFull, rank);
    if (chosen && (same_rank & lanes.group & lanes_below()) == 0) atomicAdd(&counters.ranks[rank], 1);
  } else if (chosen) {
    atomicAdd(&counters.experts[expert], 1);
  }
  std::uint32_t* const counter = counters.of_warp + warp_of() * counters.targets + target;
  const std::uint32_t number = sends ? *counter + __popc(senders & lanes_below()) : 0;
  __syncwarp();
  if (sends && (senders & lanes_below()) == 0) *counter = number + __popc(senders);
  __syncwarp();
  return sends ? static_cast<std::int32_t>(number) : -1;
}

// Visits the choices of the warp's tokens in order, all lanes at once: visit(lanes, place, valid, load(place)).
// Several steps' loads are under way together.
template <typename Load, typename Visit>
__device__ inline void for_choices(const Operation& op, const Counters& counters, Cta cta, Load load, Visit visit) {
  constexpr std::uint32_t kBatch = 4;
  if (warp_of() >= counters.warps) return;
  const ChoiceLanes lanes(op.shape.topk);
  const Range cta_tokens = part_of(op.num_tokens, cta.index, cta.count);
  const Range part = part_of(cta_tokens.end - cta_tokens.begin, warp_of(), counters.warps);
  const std::uint32_t end = cta_tokens.begin + part.end;
  for (std::uint32_t first = cta_tokens.begin + part.begin; first < end; first += kBatch * lanes.tokens()) {
    decltype(load(0u)) loaded[kBatch];
    const auto place_of = [&](std::uint32_t b) {
      return (first + b * lanes.tokens() + lanes.token) * op.shape.topk + lanes.k;
    };
    const auto is_valid = [&](std::uint32_t b) {
      return lanes.k < op.shape.topk && first + b * lanes.tokens() + lanes.token < end;
    };
#pragma unroll
    for (std::uint32_t b = 0; b < kBatch; ++b) {
      if (is_valid(b)) loaded[b] = load(place_of(b));
    }
#pragma unroll
    for (std::uint32_t b = 0; b < kBatch; ++b) {
      if (first + b * lanes.tokens() < end) visit(lanes, place_of(b), is_valid(b), loaded[b]);
    }
  }
}

// Sums of the CTA's warps to the workspace; counters become each warp's first number.
__device__ inline void sum_warps(const Operation& op, const Counters& counters, Cta cta) {
  std::uint32_t* const rank_totals = totals(op);
  std::uint32_t* const expert_totals = rank_totals + op.shape.num_ranks;
  std::uint32_t* const target_totals = op.shape.per_expert ? expert_totals : rank_totals;
  for (std::uint32_t target = threadIdx.x; target < counters.targets; target += blockDim.x) {
    std::uint32_t sum = 0;
    for (std::uint32_t warp = 0; warp < counters.warps; ++warp) {
      std::uint32_t& counter = counters.of_warp[warp * counters.targets + target];
      const std::uint32_t count = counter;
      counter = sum;
      sum += count;
    }
    cta_counts(op)[cta.index * counters.targets + target] = sum;
    if (sum != 0) atomicAdd(&target_totals[target], sum);
  }
  const std::uint32_t others = op.shape.per_expert ? op.shape.num_ranks : op.shape.num_experts;
  const std::uint32_t* const other = op.shape.per_expert ? counters.ranks : counters.experts;
  std::uint32_t* const other_totals = op.shape.per_expert ? rank_totals : expert_totals;
  for (std::uint32_t i = threadIdx.x; i < others; i += blockDim.x) {
    if (other[i] != 0) atomicAdd(&other_totals[i], other[i]);
  }
}

// The last CTA that has counted tells every rank. False: a choice was refused.
__device__ inline bool exchange_counts(const Operation& op) {
  const std::uint64_t bad = workspace(op).bad_choice;
  if (bad != 0) {
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
  const std::uint32_t ranks = op.shape.num_ranks;
  const std::uint32_t experts = op.shape.num_experts;
  for (std::uint32_t i = threadIdx.x; i < ranks + experts; i += blockDim.x) {
    const std::uint32_t count = __ldcg(totals(op) + i);
    totals(op)[i] = 0;
    const bool is_rank = i < ranks;
    const std::uint32_t only = is_rank || op.shape.per_expert ? ranks : (i - ranks) / experts_per_rank(op.shape);
    for (std::uint32_t d = 0; d < ranks; ++d) {
      if (!is_there(op, d) || (only != ranks && only != d)) continue;
      if (is_rank) {
        op.peers[d].rank_counts[op.rank * ranks + i] = count;
      } else {
        op.peers[d].expert_counts[op.rank * experts + i - ranks] = count;
      }
    }
  }
  announce(op);
  return true;
}

struct Numbered {
  std::int32_t expert;
  std::int32_t number;
};

// Reads, checks and counts this CTA's choices; afterwards routing.rows holds numbers within the CTA.
__device__ inline void number_rows(const Operation& op, Cta cta, const Counters& counters) {
  for (std::uint32_t i = threadIdx.x; i < counters.words(); i += blockDim.x) counters.ranks[i] = 0;
  __syncthreads();
  for_choices(
      op, counters, cta, [&](std::uint32_t place) { return read_choice(op, place); },
      [&](const ChoiceLanes& lanes, std::uint32_t place, bool valid, std::int64_t value) {
        const std::int32_t expert = valid ? accept_choice(op, place, value) : -1;
        const std::int32_t number = number_choice(op, counters, lanes, expert);
        if (!valid) return;
        op.routing.topk[place] = expert;
        op.routing.rows[place] = number;
      });
  __syncthreads();
  sum_warps(op, counters, cta);
  __syncthreads();
  for_choices(
      op, counters, cta,
      [&](std::uint32_t place) { return Numbered{op.routing.topk[place], op.routing.rows[place]}; },
      [&](const ChoiceLanes&, std::uint32_t place, bool valid, Numbered choice) {
        if (!valid || choice.number < 0) return;
        const std::uint32_t target =
            op.shape.per_expert ? choice.expert : choice.expert / experts_per_rank(op.shape);
        const std::uint32_t before = counters.of_warp[warp_of() * counters.targets + target];
        if (before != 0) op.routing.rows[place] = choice.number + static_cast<std::int32_t>(before);
      });
}

// Counts this CTA's tokens; the last CTA to have done so tells all ranks. False: the operation has failed.
__device__ inline bool count_choices(const Operation& op, Cta cta, const Shared& shared) {
  __shared__ bool last;
  number_rows(op, cta, Counters(op, shared));
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(&workspace(op).counted, cta.count - 1) == cta.count - 1;
  __syncthreads();
  return !last || exchange_counts(op);
}

// base = rows that lower CTAs send: compact for each CTA, else for this one. Needs all CTAs' counts.
__device__ inline void sum_lower_ctas(const Operation& op, Cta cta, const Shared& shared) {
  const std::uint32_t targets = num_targets(op.shape);
  if (!op.shape.per_expert) {
    for (std::uint32_t target = warp_of(); target < targets; target += blockDim.x / 32) {
      std::uint32_t lower = 0;
      for (std::uint32_t first = 0; first < cta.count; first += 32) {
        const std::uint32_t c = first + lane_of();
        const std::uint32_t count = c < cta.count ? __ldcg(cta_counts(op) + c * targets + target) : 0;
        const std::uint32_t sum = sum_lanes_up_to(count);
        if (c < cta.count) shared.base[c * targets + target] = lower + sum - count;
        lower += __shfl_sync(kFull, sum, 31);
      }
    }
    return;
  }
  for (std::uint32_t target = threadIdx.x; target < targets; target += blockDim.x) {
    std::uint32_t sum = 0;
#pragma unroll 8
    for (std::uint32_t c = 0; c < cta.index; ++c) sum += __ldcg(cta_counts(op) + c * targets + target);
    shared.base[target] = sum;
  }
}

}  // namespace epd::kernels::cuda
