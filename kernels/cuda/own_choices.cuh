// A rank's own choices as sets of tokens, one for each expert, in shared memory: how many rows each expert
// gets, and the number of each among them.
#pragma once

#include "cuda/landing.cuh"
#include "cuda/routing.cuh"

namespace epd::kernels::cuda {

// A choice that does not exist. Each warp that finds one looks for the first of all, so that all say the
// same.
__device__ __noinline__ inline void refuse(const Operation& op, std::uint32_t place, std::int64_t value) {
#pragma unroll 1
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

// Every CTA makes them all for itself: that is faster than to be told. A client that changes its choices
// meanwhile may so be read in different ways: its own rows then have other numbers than were counted, and the
// receiver leaves those out that it was not told of (LandedPlans::row). A row that it was told of and that is
// not sent ends the operation at the deadline, in this rank's name, as if the rank had not called.
class OwnChoices {
 public:
  __device__ OwnChoices(const Operation& op, const Shared& shared)
      : op_(op),
        set_words_((op.landing.max_tokens + 31) / 32),
        sets_(shared.bits),
        rank_sets_(sets_ + op.shape.num_experts * set_words_) {}

  // All threads; a barrier follows.
  __device__ void clear() const {
    const std::uint32_t words = (op_.shape.num_experts + op_.shape.num_ranks) * set_words_;
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < words; i += blockDim.x) sets_[i] = 0;
  }

  // Choices whose loads are under way together. The thread's share is every threads()-th.
  struct Batch {
    static constexpr std::uint32_t kCount = 4;
    std::int64_t value[kCount];
  };
  __device__ Batch load(std::uint32_t first, const Team& team) const {
    const std::uint32_t count = op_.num_tokens * op_.shape.topk;
    Batch batch;
#pragma unroll
    for (std::uint32_t j = 0; j < Batch::kCount; ++j)
      batch.value[j] = choice_at(first + j * team.threads(), count);
    return batch;
  }
  // The thread's share, of which the first are loaded. `keeps`: the routing gets them, and what is dropped is
  // counted. False: one was refused.
  __device__ bool read(Batch batch, const Team& team, bool keeps) const {
    const std::uint32_t count = op_.num_tokens * op_.shape.topk;
    const std::uint32_t step = Batch::kCount * team.threads();
    bool good = true;
#pragma unroll 1
    for (std::uint32_t first = team.thread(); first < count; first += step) {
      const Batch next = load(first + step, team);
#pragma unroll
      for (std::uint32_t j = 0; j < Batch::kCount; ++j) {
        const std::uint32_t place = first + j * team.threads();
        if (place < count) good = take(place, batch.value[j], keeps) && good;
      }
      batch = next;
    }
    return good;
  }

  // Choice `lane` of a token, read again; and what it is worth: kFull if it is none.
  __device__ std::int64_t read_lane(std::uint32_t token) const {
    const std::uint32_t count = op_.num_tokens * op_.shape.topk;
    return lane_of() < op_.shape.topk ? choice_at(token * op_.shape.topk + lane_of(), count) : -1;
  }
  __device__ std::uint32_t accepted(std::int64_t value, std::uint32_t token) const {
    if (value < 0 || value >= op_.shape.num_experts) return kFull;
    const auto expert = static_cast<std::uint32_t>(value);
    return ((set(expert)[token / 32] >> token % 32) & 1) != 0 ? expert : kFull;
  }
  // Of a token's row among those that the expert gets from this rank.
  __device__ std::uint32_t number(std::uint32_t expert, std::uint32_t token) const {
    return members(set(expert), token);
  }

  // CTA 0: tells every rank the plan. A team.
  __device__ void tell_plan(const Team& team) const {
    const PlanWords words(op_);
    tell_counts(team, words);
#pragma unroll 1
    for (std::uint32_t i = team.threads() - 1 - team.thread(); i < words.counts_of(0); i += team.threads())
      tell_all(words, i, [this, i](std::uint32_t d) { return i == 0 ? op_.num_tokens : rank_set(d, i - 1); });
  }

  // CTA 0: the rows of this rank's tokens, where `base` says that they begin. The routing has the choices. A
  // team.
  __device__ void write_rows(const Team& team, const std::uint32_t* base) const {
    const ChoiceLanes lanes(op_.shape.topk);
    const std::uint32_t step = lanes.tokens() * team.warps;
#pragma unroll 1
    for (std::uint32_t begin = team.warp() * lanes.tokens(); begin < op_.num_tokens; begin += step) {
      const std::uint32_t token = begin + lanes.token;
      const bool valid = token < op_.num_tokens && lanes.k < op_.shape.topk;
      const std::uint32_t place = token * op_.shape.topk + lanes.k;
      const std::int32_t expert = valid ? __ldcg(op_.routing.topk + place) : -1;
      const bool first = (__match_any_sync(kFull, expert) & lanes.group & lanes_below()) == 0;
      if (!valid) continue;
      const bool sends = expert >= 0 && first;
      op_.routing.rows[place] = sends ? static_cast<std::int32_t>(base[expert] + number(expert, token)) : -1;
    }
  }

 private:
  // Read once from memory that the client may be changing; or from a known routing.
  __device__ std::int64_t choice_at(std::uint32_t place, std::uint32_t count) const {
    if (place >= count) return -1;
    if (!op_.cached && op_.shape.index64)
      return static_cast<const volatile std::int64_t*>(op_.topk_idx)[place];
    return static_cast<const volatile std::int32_t*>(op_.cached ? op_.routing.topk : op_.topk_idx)[place];
  }
  __device__ __noinline__ bool take(std::uint32_t place, std::int64_t value, bool keeps) const {
    if (value < -1 || value >= op_.shape.num_experts) {
      refuse(op_, place, value);
      return false;
    }
    const auto expert = static_cast<std::uint32_t>(value);
    const std::uint32_t rank = value < 0 ? 0 : rank_of_expert(op_.shape, expert);
    const bool counts = value >= 0 && is_there(op_, rank);
    if (keeps) {
      if (value >= 0 && !counts) atomicAdd(&workspace(op_).dropped, 1);
      if (!op_.cached) op_.routing.topk[place] = counts ? static_cast<std::int32_t>(expert) : -1;
    }
    if (!counts) return true;
    const std::uint32_t token = token_of_choice(op_.shape, place);
    or_shared(set(expert) + token / 32, 1u << token % 32);
    if (keeps) or_shared(rank_sets_ + rank * set_words_ + token / 32, 1u << token % 32);
    return true;
  }
  __device__ std::uint32_t* set(std::uint32_t expert) const {
    return sets_ + expert * set_words_;
  }
  // Tokens of the set below `token`.
  __device__ static std::uint32_t members(const std::uint32_t* set, std::uint32_t token) {
    std::uint32_t count = 0;
#pragma unroll 1
    for (std::uint32_t word = 0; word < token / 32; ++word) count += __popc(set[word]);
    if (token % 32 != 0) count += __popc(set[token / 32] & ((1u << token % 32) - 1));
    return count;
  }
  // Word i of the plan, value(d) to rank d.
  template <typename Value>
  __device__ void tell_all(const PlanWords& words, std::uint32_t i, Value value) const {
#pragma unroll 1
    for (std::uint32_t d = 0; d < op_.shape.num_ranks; ++d) {
      if (is_there(op_, d)) tell(words.at(op_, d, op_.rank) + i, op_.tag, value(d));
    }
  }
  // Four lanes to a word, since all others wait for it.
  __device__ void tell_counts(const Team& team, const PlanWords& words) const {
    const std::uint32_t count = words.end - words.counts_of(0);
    const std::uint32_t experts = experts_per_rank(op_.shape);
#pragma unroll 1
    for (std::uint32_t begin = team.warp() * 8; begin < count; begin += team.warps * 8) {
      const std::uint32_t i = begin + lane_of() / 4;
      const std::uint32_t rank = words.rank_of_count(op_, i);
      const std::uint32_t local = (i - rank * words.count_words) * 4 + lane_of() % 4;
      std::uint32_t rows = 0;
      if (i < count && local < experts) rows = members(set(rank * experts + local), set_words_ * 32);
      rows <<= lane_of() % 2 * 16;
      rows |= __shfl_xor_sync(kFull, rows, 1);
      const std::uint64_t four = std::uint64_t{__shfl_xor_sync(kFull, rows, 2)} << 32 | rows;
      if (lane_of() % 4 == 0 && i < count)
        tell_all(words, words.counts_of(0) + i, [four](std::uint32_t) { return four; });
    }
  }
  __device__ std::uint64_t rank_set(std::uint32_t rank, std::uint32_t word) const {
    const std::uint32_t* const set = rank_sets_ + rank * set_words_ + word * 2;
    const std::uint32_t high = word * 2 + 1 < set_words_ ? set[1] : 0;
    return std::uint64_t{high} << 32 | set[0];
  }

  const Operation& op_;
  const std::uint32_t set_words_;
  std::uint32_t* const sets_;       // [E,set_words]
  std::uint32_t* const rank_sets_;  // [R,set_words]; CTA 0
};

}  // namespace epd::kernels::cuda
