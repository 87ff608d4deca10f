// A rank's own choices in shared memory, as a set of tokens for each expert. The sets give the number of rows
// for each expert, and the number of each row among them.
#pragma once

#include "cuda/common/routing.cuh"
#include "cuda/low_latency/inbox.cuh"

namespace epd::kernels::cuda {

// Fails the operation because of an invalid choice. A thread that finds an invalid choice rescans the earlier
// ones, so that the error names the first.
__device__ __noinline__ inline void refuse(const Operation& op, std::uint32_t place, std::int64_t value) {
#pragma unroll 1
  for (std::uint32_t lower = 0; lower < place; ++lower) {
    const std::int64_t other = read_choice(op, lower);
    if (other < op.shape.num_experts) continue;
    place = lower;
    value = other;
  }
  OpResult ending = ended(OpError::kBadChoice, static_cast<std::int32_t>(op.rank));
  ending.token = place / op.shape.topk;
  ending.k = place % op.shape.topk;
  ending.value = static_cast<std::int32_t>(min(value, std::int64_t{INT32_MAX}));
  fail(op, ending);
}

// Where choices are read from: the client's memory, which may change at the same time, or a known routing. An
// index stays unconverted until it is needed, so that loads do not wait for each other.
using RawIndex = std::uint64_t;
struct IndexSource {
  const void* at;
  bool wide;

  __device__ explicit IndexSource(const Operation& op)
      : at(op.cached ? op.routing.topk : op.topk_idx), wide(!op.cached && op.shape.index64) {}
  // Returns -1 for a `place` from `end` on.
  __device__ RawIndex load(std::uint32_t place, std::uint32_t end) const {
    RawIndex raw[1];
    load(raw, place, 0, end);
    return raw[0];
  }
  // Loads the indices at `place`, and at every `step` places after it.
  template <std::uint32_t kCount>
  __device__ void load(RawIndex (&raw)[kCount], std::uint32_t place, std::uint32_t step,
                       std::uint32_t end) const {
    if (wide) {
      load_from(static_cast<const std::uint64_t*>(at), raw, place, step, end);
    } else {
      load_from(static_cast<const std::uint32_t*>(at), raw, place, step, end);
    }
  }
  __device__ std::int64_t value(RawIndex raw) const {
    return wide ? static_cast<std::int64_t>(raw) : static_cast<std::int32_t>(raw);
  }

 private:
  template <typename Index, std::uint32_t kCount>
  __device__ static void load_from(const Index* from, RawIndex (&raw)[kCount], std::uint32_t place,
                                   std::uint32_t step, std::uint32_t end) {
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) {
      raw[i] = ~RawIndex{0};
      if (place + i * step < end) raw[i] = load_relaxed_system(from + place + i * step);
    }
  }
};

// The rank's choices. Every CTA reads them all for itself, which is faster than an exchange. If a client
// changes its choices at the same time, CTAs may read different values. Then the numbers of the client's own
// rows differ from the counts, and the receiver skips rows that no plan message has announced
// (ReceivedPlans::row). If an announced row is not sent, the operation ends at the deadline, with this rank
// as the failed rank.
class OwnChoices {
 public:
  __device__ OwnChoices(const Operation& op, const Shared& shared) : op_(op), sets_(shared.bits) {}

  // Clears the sets. A team calls; a barrier must follow.
  __device__ void clear(const Team& team) const {
    const std::uint32_t words = (op_.shape.num_experts + op_.shape.num_ranks) * op_.division.set_words;
    EPD_AT_MOST(words, bits_words(op_));
#pragma unroll 1
    for (std::uint32_t i = team.thread(); i < words; i += team.threads()) sets_[i] = 0;
  }

  // Reads the calling warp's share of the choices into the sets. CTA 0 also stores the choices in the
  // routing, so that the routing is what the plan says, and counts dropped selections. The loads of a batch
  // are in flight together; then the choices are taken one by one, so that a warp runs through no more code
  // than it has choices (kernels/CUDA_KERNELS.md). `meanwhile()` is called when the first loads are in
  // flight. Returns false if a choice is invalid.
  template <typename Meanwhile>
  __device__ bool read(const Team& team, Meanwhile meanwhile) const {
    const ChoiceLanes lanes(op_.shape.topk);
    const IndexSource source(op_);
    Taken taken(op_);
    const std::uint32_t step = lanes.tokens() * team.warps;
    std::uint32_t first = lanes.tokens() * team.warp();  // the warp's first token of the next step
    std::uint32_t place = (first + lanes.token) * op_.shape.topk + lanes.k;
    const std::uint32_t end = lanes.k < op_.shape.topk ? op_.num_tokens * op_.shape.topk : 0;
    RawIndex raw[kBatch];
    bool begun = false;
#pragma unroll 1
    do {
      source.load(raw, place, step * op_.shape.topk, end);
      if (!begun) meanwhile();
      begun = true;
#pragma unroll 1
      for (std::uint32_t i = 0; i < kBatch && first < op_.num_tokens; ++i) {
        if (place < end) take(taken, first + lanes.token, place, source.value(raw[0]));
#pragma unroll
        for (std::uint32_t j = 1; j < kBatch; ++j) raw[j - 1] = raw[j];
        first += step;
        place += step * op_.shape.topk;
      }
    } while (first < op_.num_tokens);
    if (taken.records && taken.dropped != 0) atomicAdd(&workspace(op_).dropped, taken.dropped);
    if (taken.bad == kFull) return true;
    refuse(op_, taken.bad, taken.bad_value);
    return false;
  }

  // Reads choice `lane` of a token again.
  __device__ std::int64_t read_lane(std::uint32_t token) const {
    const IndexSource source(op_);
    const std::uint32_t count = lane_of() < op_.shape.topk ? op_.num_tokens * op_.shape.topk : 0;
    return source.value(source.load(token * op_.shape.topk + lane_of(), count));
  }
  // Returns the expert of a choice that was read again, or kFull if it is none or not in the sets.
  __device__ std::uint32_t accepted(std::int64_t value, std::uint32_t token) const {
    if (value < 0 || value >= op_.shape.num_experts) return kFull;
    const auto expert = static_cast<std::uint32_t>(value);
    EPD_BELOW(token / 32, op_.division.set_words);
    return ((set(expert)[token / 32] >> token % 32) & 1) != 0 ? expert : kFull;
  }
  // Returns the number of a token's row among the rows that the expert gets from this rank.
  __device__ std::uint32_t number(std::uint32_t expert, std::uint32_t token) const {
    EPD_BELOW(expert, op_.shape.num_experts);
    EPD_BELOW(token, op_.division.set_words * 32);
    return members(set(expert), token);
  }

  // Sends the plan message to every rank. A team of CTA 0 calls.
  __device__ void send_plan(const Team& team) const {
    const abi::PlanWords& words = op_.division.plan;
    send_count_words(team, words);
#pragma unroll 1
    for (std::uint32_t i = team.threads() - 1 - team.thread(); i < words.counts_of(0); i += team.threads())
      send_plan_word(i, [this, i](std::uint32_t d) { return i == 0 ? op_.num_tokens : rank_set(d, i - 1); });
  }

  // Stores the rows of this rank's tokens in the routing; `base` says where they begin. The routing already
  // has the choices. A team of CTA 0 calls.
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
      EPD_BELOW_OR_NONE(expert, op_.shape.num_experts);
      op_.routing.rows[place] = sends ? static_cast<std::int32_t>(base[expert] + number(expert, token)) : -1;
    }
  }

 private:
  static constexpr std::uint32_t kBatch = 4;  // choices whose loads are in flight together
  // The inputs of read(), and its findings.
  struct Taken {
    bool records = blockIdx.x == 0;
    std::uint32_t active;  // set of active ranks
    bool all_active;
    std::uint32_t dropped = 0;
    std::uint32_t bad = kFull;  // place of an invalid choice
    std::int64_t bad_value = 0;
    __device__ explicit Taken(const Operation& op) : active(active_ranks(op)) {
      all_active = static_cast<std::uint32_t>(__popc(active)) == op.shape.num_ranks;
    }
  };
  // Takes one choice.
  __device__ void take(Taken& taken, std::uint32_t token, std::uint32_t place, std::int64_t value) const {
    const auto expert = static_cast<std::uint32_t>(value);
    bool counts = static_cast<std::uint64_t>(value) < op_.shape.num_experts;
    if (!counts && value >= 0) {
      taken.bad = place;
      taken.bad_value = value;
    }
    if (counts && (taken.records || !taken.all_active)) {
      const std::uint32_t rank = rank_of_expert(op_.shape, expert);
      EPD_BELOW(rank, op_.shape.num_ranks);
      counts = ((taken.active >> rank) & 1) != 0;
      if (!counts) ++taken.dropped;
      if (counts && taken.records)
        or_shared(set(op_.shape.num_experts + rank) + token / 32, 1u << token % 32);
    }
    if (counts) EPD_BELOW(token / 32, op_.division.set_words);
    if (counts) or_shared(set(expert) + token / 32, 1u << token % 32);
    if (taken.records && !op_.cached)
      op_.routing.topk[place] = counts ? static_cast<std::int32_t>(expert) : -1;
  }
  // The set of tokens that chose the expert.
  __device__ std::uint32_t* set(std::uint32_t expert) const {
    EPD_BELOW(expert, op_.shape.num_experts + op_.shape.num_ranks);
    return sets_ + expert * op_.division.set_words;
  }
  // Counts the tokens of a set below `token`.
  __device__ static std::uint32_t members(const std::uint32_t* set, std::uint32_t token) {
    std::uint32_t count = 0;
#pragma unroll 1
    for (std::uint32_t word = 0; word < token / 32; ++word) count += __popc(set[word]);
    if (token % 32 != 0) count += __popc(set[token / 32] & ((1u << token % 32) - 1));
    return count;
  }
  // Publishes word i of the plan message; value(d) is its value for rank d.
  template <typename Value>
  __device__ void send_plan_word(std::uint32_t i, Value value) const {
    EPD_BELOW(i, op_.division.plan.end);
#pragma unroll 1
    for (std::uint32_t d = 0; d < op_.shape.num_ranks; ++d) {
      if (is_active(op_, d)) publish_word(plan_words(op_, d, op_.rank) + i, op_.tag, value(d));
    }
  }
  // Publishes the words of counts, four counts to a word. Four lanes count for one word, since all other
  // ranks wait for it.
  __device__ void send_count_words(const Team& team, const abi::PlanWords& words) const {
    const std::uint32_t count = words.end - words.counts_of(0);
    const std::uint32_t experts = experts_per_rank(op_.shape);
#pragma unroll 1
    for (std::uint32_t begin = team.warp() * 8; begin < count; begin += team.warps * 8) {
      const std::uint32_t i = begin + lane_of() / 4;
      const std::uint32_t rank = rank_of_count(op_, i);
      const std::uint32_t local = (i - rank * words.count_words) * 4 + lane_of() % 4;
      std::uint32_t rows = 0;
      if (i < count && local < experts)
        rows = members(set(rank * experts + local), op_.division.set_words * 32);
      rows <<= lane_of() % 2 * 16;
      rows |= __shfl_xor_sync(kFull, rows, 1);
      const std::uint64_t four = std::uint64_t{__shfl_xor_sync(kFull, rows, 2)} << 32 | rows;
      if (lane_of() % 4 == 0 && i < count)
        send_plan_word(words.counts_of(0) + i, [four](std::uint32_t) { return four; });
    }
  }
  // Returns word `word` of the set of tokens that chose an expert of `rank`.
  __device__ std::uint64_t rank_set(std::uint32_t rank, std::uint32_t word) const {
    EPD_BELOW(rank, op_.shape.num_ranks);
    EPD_BELOW(word * 2, op_.division.set_words);
    const std::uint32_t* const words = set(op_.shape.num_experts + rank) + word * 2;
    const std::uint32_t high = word * 2 + 1 < op_.division.set_words ? words[1] : 0;
    return std::uint64_t{high} << 32 | words[0];
  }

  const Operation& op_;
  std::uint32_t* const sets_;  // [E,set_words]; in CTA 0 followed by the sets of ranks, [R,set_words]
};

}  // namespace epd::kernels::cuda
