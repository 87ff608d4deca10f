// Everybody's choices as sets of tokens, one for each (expert, source), in shared memory: counts, numbers and
// places follow from them.
#pragma once

#include "cuda/landing.cuh"
#include "cuda/placement.cuh"

namespace epd::kernels::cuda {

// Choice k of a token, told before; kFull: none (0xffff in the word).
__device__ inline std::uint32_t chosen_expert(const Operation& op, std::uint32_t source, std::uint32_t token,
                                              std::uint32_t k) {
  if (k >= op.shape.topk) return kFull;
  const ToldWord word = look(chosen_words(op, op.rank, source, token) + k / 4);
  const auto expert = static_cast<std::uint16_t>(word.value >> (k % 4 * 16));
  return expert == 0xffff ? kFull : expert;
}

// A choice that does not exist. Each warp that finds one looks for the first of all, so that all say the
// same.
__device__ __noinline__ inline void refuse(const Operation& op, std::uint32_t place, std::int64_t value) {
  for (std::uint32_t lower = 0; lower < place; ++lower) {
    const std::int64_t other = read_choice(op, lower);
    if (other >= -1 && other < op.shape.num_experts) continue;
    place = lower;
    value = other;
  }
  OpResult ending = ended(OpError::kBadChoice, static_cast<std::int32_t>(op.rank));
  ending.token = place / op.shape.topk;
  ending.k = place % op.shape.topk;
  ending.value = static_cast<std::int32_t>(max(min(value, std::int64_t{INT32_MAX}), std::int64_t{INT32_MIN}));
  fail(op, ending);
}

// A CTA has the sets of its rank's experts; CTA 0, which finds the places of this rank's rows everywhere,
// those of all.
class ChoiceBits {
 public:
  __device__ ChoiceBits(const Operation& op, Cta cta, const Shared& shared)
      : op_(op),
        set_words_((op.landing.max_tokens + 31) / 32),
        first_expert_(cta.index == 0 ? 0 : op.rank * experts_per_rank(op.shape)),
        experts_(cta.index == 0 ? op.shape.num_experts : experts_per_rank(op.shape)),
        sets_(cta.index == 0 && cta.count > 1 ? reinterpret_cast<std::uint32_t*>(shared.stages)
                                              : shared.bits),
        first_(shared.scratch),
        count_(shared.scratch + op.shape.num_experts) {}

  // The first `threads` threads of the CTA.
  __device__ void clear(std::uint32_t threads) const {
    const std::uint32_t words = experts_ * op_.shape.num_ranks * set_words_;
    for (std::uint32_t i = threadIdx.x; i < words; i += threads) sets_[i] = 0;
  }

  // The thread's share of what everybody tells. False: the operation has failed.
  __device__ bool collect(const Team& team, const std::uint32_t* tokens, std::uint64_t deadline_ns) const {
    const std::uint32_t ranks = op_.shape.num_ranks;
    const std::uint32_t words = chosen_per_token(op_.shape);
    std::uint32_t most = 0;
    for (std::uint32_t s = 0; s < ranks; ++s) most = max(most, tokens[s]);
    const std::uint32_t step = kBatch * team.threads();
    for (std::uint32_t first = team.thread(); first < most * words * ranks; first += step) {
      std::uint32_t waiting = 0;
      for (std::uint32_t j = 0; j < kBatch; ++j) {
        const std::uint32_t i = first + j * team.threads();
        if (i / ranks < tokens[i % ranks] * words) waiting |= 1u << j;
      }
      if (!collect_batch(first, team.threads(), waiting, deadline_ns)) return false;
    }
    return true;
  }

  // How many rows each source sends to each expert of this rank. A team.
  __device__ void count(const Team& team) const {
    const std::uint32_t ranks = op_.shape.num_ranks;
    for (std::uint32_t i = team.thread(); i < op_.shape.num_experts; i += team.threads())
      count_[i] = members(set(own(i / ranks), i % ranks), op_.landing.max_tokens);
    team.sync();
  }

  // Where they begin; `ends` as place_rows has them. False: there is no room.
  __device__ bool place(const Team& team, std::uint32_t* ends) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    bool fits = true;
    std::uint32_t offset = 0;  // packed: of the next expert
    const std::uint32_t step = op_.shape.expert_blocks ? team.threads() : 32;
    if (!op_.shape.expert_blocks && team.warp() != 0) return team.all(true);
    for (std::uint32_t begin = 0; begin < experts; begin += step) {
      const std::uint32_t i = begin + (op_.shape.expert_blocks ? team.thread() : lane_of());
      std::uint32_t total = 0;
      if (i < experts) {
        for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s) total += count_[i * op_.shape.num_ranks + s];
      }
      std::uint32_t at = 0;
      std::uint32_t end = 0;
      if (op_.shape.expert_blocks) {
        at = static_cast<std::uint32_t>(i * op_.shape.expert_capacity);
        end = at + static_cast<std::uint32_t>(op_.shape.expert_capacity);
        if (i < experts && total > op_.shape.expert_capacity) {
          fits = false;
          fail_room(op_, op_.rank, static_cast<std::int32_t>(op_.rank * experts + i), total);
        }
      } else {
        const std::uint32_t padded = round_up(total, op_.shape.alignment);
        end = offset + sum_lanes_up_to(padded);
        at = end - padded;
        offset = __shfl_sync(kFull, end, 31);
      }
      if (i < experts) begin_sources(i, at, ends, total, end);
    }
    if (!op_.shape.expert_blocks && offset > op_.shape.recv_rows) {
      fits = false;
      if (lane_of() == 0) fail_room(op_, op_.rank, -1, offset);
    }
    return team.all(fits);
  }

  // Of an expert of this rank; beyond all for others and for none.
  __device__ std::uint32_t local(std::uint32_t expert) const {
    return expert - op_.rank * experts_per_rank(op_.shape);
  }
  // The row of a token that has chosen expert `local`.
  __device__ std::uint32_t row(std::uint32_t local, std::uint32_t source, std::uint32_t token) const {
    return first_[local * op_.shape.num_ranks + source] + members(set(own(local), source), token);
  }

  // CTA 0: where this rank's rows begin at each expert, as place_rows says. A team. False: there is no room.
  __device__ bool place_own(const Team& team, std::uint32_t* base) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    bool fits = true;
    if (op_.shape.expert_blocks) {
      for (std::uint32_t e = team.thread(); e < op_.shape.num_experts; e += team.threads()) {
        const ColumnSum rows = sum(e);
        base[e] = static_cast<std::uint32_t>(e % experts * op_.shape.expert_capacity) + rows.below;
        if (rows.total <= op_.shape.expert_capacity) continue;
        fits = false;
        fail_room(op_, e / experts, static_cast<std::int32_t>(e), rows.total);
      }
      return team.all(fits);
    }
    for (std::uint32_t d = team.warp(); d < op_.shape.num_ranks; d += team.warps) {
      std::uint32_t offset = 0;
      for (std::uint32_t first = 0; first < experts; first += 32) {
        const std::uint32_t i = first + lane_of();
        const ColumnSum rows = i < experts ? sum(d * experts + i) : ColumnSum{};
        const std::uint32_t padded = round_up(rows.total, op_.shape.alignment);
        const std::uint32_t end = sum_lanes_up_to(padded);
        if (i < experts) base[d * experts + i] = offset + end - padded + rows.below;
        offset += __shfl_sync(kFull, end, 31);
      }
      if (offset <= op_.shape.recv_rows) continue;
      fits = false;
      if (lane_of() == 0) fail_room(op_, d, -1, offset);
    }
    return team.all(fits);
  }

  // Room for a placement's words: of CTA 0, which has no stages, behind the sets; else in global memory.
  __device__ std::int32_t* placement_words(const Shared& shared) const {
    if (sets_ == shared.bits) return op_.routing.placement;
    return reinterpret_cast<std::int32_t*>(sets_ + op_.shape.num_experts * op_.shape.num_ranks * set_words_);
  }

  // CTA 0: the placement, as record_placement has it. A team.
  __device__ void write_placement(const Team& team, const Shared& shared, std::int32_t* words) const {
    const PlacementSections at(op_.shape);
    const std::uint32_t ranks = op_.shape.num_ranks;
    const std::uint32_t experts = experts_per_rank(op_.shape);
    for (std::uint32_t i = team.thread(); i < at.rank_offsets; i += team.threads()) words[i] = shared.base[i];
    for (std::uint32_t i = team.thread(); i < experts; i += team.threads()) {
      words[at.expert_counts + i] = shared.ends[i * 2] - first_[i * ranks];
      words[at.expert_offsets + i] = first_[i * ranks];
      if (i == experts - 1) words[at.expert_offsets + experts] = shared.ends[i * 2 + 1];
    }
    for (std::uint32_t i = team.thread(); i < op_.shape.num_experts; i += team.threads()) {
      words[at.source_ranges + i * 2] = first_[i];
      words[at.source_ranges + i * 2 + 1] = count_[i];
    }
    if (team.warp() == team.warps - 1) write_rank_offsets(words + at.rank_offsets);
    team.sync();
  }

  // CTA 0: the rows of this rank's tokens, where `base` says that they begin. A team.
  __device__ void write_rows(const Team& team, const std::uint32_t* base) const {
    const ChoiceLanes lanes(op_.shape.topk);
    const std::uint32_t step = lanes.tokens() * team.warps;
    for (std::uint32_t begin = team.warp() * lanes.tokens(); begin < op_.num_tokens; begin += kBatch * step) {
      std::uint32_t expert[kBatch];
#pragma unroll
      for (std::uint32_t j = 0; j < kBatch; ++j) {
        const std::uint32_t token = begin + j * step + lanes.token;
        expert[j] = token < op_.num_tokens ? chosen_expert(op_, op_.rank, token, lanes.k) : kFull;
      }
#pragma unroll
      for (std::uint32_t j = 0; j < kBatch; ++j) {
        const std::uint32_t token = begin + j * step + lanes.token;
        const bool first = (__match_any_sync(kFull, expert[j]) & lanes.group & lanes_below()) == 0;
        if (token >= op_.num_tokens || lanes.k >= op_.shape.topk) continue;
        const bool sends = expert[j] != kFull && first;
        op_.routing.rows[token * op_.shape.topk + lanes.k] =
            sends ? static_cast<std::int32_t>(base[expert[j]] + members(set(expert[j], op_.rank), token))
                  : -1;
      }
    }
  }

  // M. A warp.
  __device__ std::uint32_t num_rows(const std::uint32_t* ends) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    if (!op_.shape.expert_blocks) return ends[experts * 2 - 1];
    std::uint32_t rows = 0;
    for (std::uint32_t i = lane_of(); i < experts; i += 32)
      rows += ends[i * 2] - static_cast<std::uint32_t>(i * op_.shape.expert_capacity);
    return __reduce_add_sync(kFull, rows);
  }

 private:
  static constexpr std::uint32_t kBatch = 4;

  __device__ std::uint32_t own(std::uint32_t local) const {
    return op_.rank * experts_per_rank(op_.shape) - first_expert_ + local;
  }
  __device__ std::uint32_t* set(std::uint32_t expert, std::uint32_t source) const {
    return sets_ + (expert * op_.shape.num_ranks + source) * set_words_;
  }
  // Rows of all sources at an expert, and of those below this rank.
  __device__ ColumnSum sum(std::uint32_t expert) const {
    ColumnSum rows;
    for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s) {
      const std::uint32_t count = members(set(expert, s), op_.landing.max_tokens);
      rows.total += count;
      if (s < op_.rank) rows.below += count;
    }
    return rows;
  }
  // Tokens of each source that come to this rank, summed up. A warp.
  __device__ void write_rank_offsets(std::int32_t* offsets) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    std::uint32_t tokens = 0;
    for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s) {
      if (lane_of() == 0) offsets[s] = static_cast<std::int32_t>(tokens);
      for (std::uint32_t word = 0; word < set_words_; ++word) {
        std::uint32_t any = 0;
        for (std::uint32_t i = lane_of(); i < experts; i += 32) any |= set(own(i), s)[word];
        tokens += __popc(__reduce_or_sync(kFull, any));
      }
    }
    if (lane_of() == 0) offsets[op_.shape.num_ranks] = static_cast<std::int32_t>(tokens);
  }
  // Tokens of the set below `token`.
  __device__ std::uint32_t members(const std::uint32_t* set, std::uint32_t token) const {
    std::uint32_t count = 0;
    for (std::uint32_t word = 0; word < token / 32; ++word) count += __popc(set[word]);
    if (token % 32 != 0) count += __popc(set[token / 32] & ((1u << token % 32) - 1));
    return count;
  }

  __device__ void add(std::uint32_t source, std::uint32_t token, std::uint64_t choices) const {
    for (std::uint32_t j = 0; j < 4; ++j, choices >>= 16) {
      const std::uint32_t expert = static_cast<std::uint16_t>(choices) - first_expert_;
      if (expert < experts_) atomicOr(set(expert, source) + token / 32, 1u << token % 32);
    }
  }

  // Words first, first + step, ...: those of `waiting`, whose loads are under way together.
  __device__ bool collect_batch(std::uint32_t first, std::uint32_t step, std::uint32_t waiting,
                                std::uint64_t deadline_ns) const {
    const std::uint32_t ranks = op_.shape.num_ranks;
    const std::uint32_t words = chosen_per_token(op_.shape);
    for (std::uint32_t looks = 1; waiting != 0; ++looks) {
      ToldWord word[kBatch];
#pragma unroll
      for (std::uint32_t j = 0; j < kBatch; ++j) {
        const std::uint32_t i = first + j * step;
        if (((waiting >> j) & 1) != 0)
          word[j] = look(chosen_words(op_, op_.rank, i % ranks, i / ranks / words) + i / ranks % words);
      }
#pragma unroll
      for (std::uint32_t j = 0; j < kBatch; ++j) {
        const std::uint32_t i = first + j * step;
        if (((waiting >> j) & 1) == 0 || word[j].tag != op_.tag) continue;
        waiting &= ~(1u << j);
        add(i % ranks, i / ranks / words, word[j].value);
      }
      if (waiting == 0 || looks % 64 != 0) continue;
      const std::uint32_t source = (first + (__ffs(static_cast<int>(waiting)) - 1) * step) % ranks;
      if (must_leave(op_, deadline_ns, 1u << source)) return false;
    }
    return true;
  }

  __device__ void begin_sources(std::uint32_t local, std::uint32_t at, std::uint32_t* ends,
                                std::uint32_t total, std::uint32_t end) const {
    ends[local * 2] = at + total;
    ends[local * 2 + 1] = end;
    for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s) {
      first_[local * op_.shape.num_ranks + s] = at;
      at += count_[local * op_.shape.num_ranks + s];
    }
  }

  const Operation& op_;
  const std::uint32_t set_words_;
  const std::uint32_t first_expert_;
  const std::uint32_t experts_;
  std::uint32_t* const sets_;   // [experts,R,set_words]
  std::uint32_t* const first_;  // [E/R,R]
  std::uint32_t* const count_;  // [E/R,R]
};

}  // namespace epd::kernels::cuda
