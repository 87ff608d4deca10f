// The plan messages that this rank has received. They say where received rows lie at this rank and, in CTA 0,
// where this rank's rows lie at all ranks.
#pragma once

#include "cuda/common/placement.cuh"
#include "cuda/low_latency/inbox.cuh"

namespace epd::kernels::cuda {

// The plan messages of all ranks, in shared memory. Functions with a Team are called by all its threads.
class ReceivedPlans {
 public:
  __device__ ReceivedPlans(const Operation& op, Cta cta, const Shared& shared, CtaBoard& board)
      : op_(op), board_(board), words_(op.division.plan), first_(shared.scratch), sets_(shared.bits) {
    if (cta.index != 0) return;
    all_ = cta.count > 1 ? reinterpret_cast<std::uint32_t*>(shared.stages) : set(op.shape.num_ranks);
  }

  // Collects the words of all plan messages that the CTA needs. Returns false if the operation has failed.
  __device__ bool collect(const Team& team, std::uint64_t deadline_ns) const {
    const std::uint32_t ranks = op_.shape.num_ranks;
    const std::uint32_t count = ranks * (all_ != nullptr ? words_.end : words_.counts_of(1));
    bool good = true;
#pragma unroll 1
    for (std::uint32_t i = team.thread(); i < count && good; i += team.threads())
      good = collect_word(i, deadline_ns);
    return team.all(good);
  }

  // Computes the place of each (expert, source), and `ends` as place_rows() does. Returns false if there is
  // not enough room.
  __device__ bool place(const Team& team, std::uint32_t* ends) const {
    if (op_.shape.expert_blocks) return team.all(place_blocks(team, ends));
    return team.all(team.warp() != 0 || place_packed(ends));
  }

  // Returns whether the source sends the token's row to this rank.
  __device__ bool will_come(std::uint32_t source, std::uint32_t token) const {
    EPD_BELOW(source, op_.shape.num_ranks);
    EPD_AT_MOST(board_.tokens[source], op_.division.set_words * 32);
    return token < board_.tokens[source] && ((set(source)[token / 32] >> token % 32) & 1) != 0;
  }
  // Returns an expert's number within this rank. For other ranks' experts and for none it is out of range.
  __device__ std::uint32_t local(std::uint32_t expert) const {
    return expert - op_.rank * experts_per_rank(op_.shape);
  }
  // Returns the place of row `number` among the rows that the source sends to expert `local`; -1 if the plan
  // message has no such row.
  __device__ std::int32_t row(std::uint32_t local, std::uint32_t source, std::uint32_t number) const {
    EPD_BELOW(local, experts_per_rank(op_.shape));
    EPD_BELOW(source, op_.shape.num_ranks);
    const std::uint32_t i = local * op_.shape.num_ranks + source;
    if (number < count()[i]) EPD_BELOW(first_[i] + number, op_.shape.recv_rows);
    return number < count()[i] ? static_cast<std::int32_t>(first_[i] + number) : -1;
  }

  // Computes where this rank's rows begin at each expert, as place_rows() does. Only CTA 0 calls. Returns
  // false if there is not enough room.
  __device__ bool place_own(const Team& team, std::uint32_t* base) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    bool fits = true;
    if (op_.shape.expert_blocks) {
#pragma unroll 1
      for (std::uint32_t e = team.thread(); e < op_.shape.num_experts; e += team.threads()) {
        const ColumnSum rows = sum(e);
        const std::uint32_t rank = rank_of_expert(op_.shape, e);
        EPD_BELOW(e, base_words(op_));
        EPD_BELOW(rank, op_.shape.num_ranks);
        base[e] = static_cast<std::uint32_t>((e - rank * experts) * op_.shape.expert_capacity) + rows.below;
        if (rows.total <= op_.shape.expert_capacity) continue;
        fits = false;
        fail_room(op_, rank, static_cast<std::int32_t>(e), rows.total);
      }
      return team.all(fits);
    }
#pragma unroll 1
    for (std::uint32_t d = team.warp(); d < op_.shape.num_ranks; d += team.warps) {
      std::uint32_t offset = 0;
#pragma unroll 1
      for (std::uint32_t first = 0; first < experts; first += 32) {
        const std::uint32_t i = first + lane_of();
        const ColumnSum rows = i < experts ? sum(d * experts + i) : ColumnSum{};
        const std::uint32_t padded = round_up(rows.total, op_.shape.alignment);
        const std::uint32_t end = sum_lanes_up_to(padded);
        if (i < experts) EPD_BELOW(d * experts + i, base_words(op_));
        if (i < experts) base[d * experts + i] = offset + end - padded + rows.below;
        offset += __shfl_sync(kFull, end, 31);
      }
      if (offset <= op_.shape.recv_rows) continue;
      fits = false;
      if (lane_of() == 0) fail_room(op_, d, -1, offset);
    }
    return team.all(fits);
  }

  // Space for a placement's words: after the counts in CTA 0, which has no stages; with a single CTA in the
  // routing record.
  __device__ std::int32_t* placement_words(Cta cta) const {
    if (cta.count == 1) return op_.routing.placement;
    EPD_AT_MOST(op_.division.header_bytes +
                    (op_.shape.num_experts * op_.shape.num_ranks + PlacementSections(op_.shape).end) * 4,
                op_.division.shared_bytes);
    return reinterpret_cast<std::int32_t*>(all_ + op_.shape.num_experts * op_.shape.num_ranks);
  }

  // Writes the placement, as record_placement() does. Only CTA 0 calls.
  __device__ void write_placement(const Team& team, const Shared& shared, std::int32_t* words) const {
    const PlacementSections at(op_.shape);
    const std::uint32_t ranks = op_.shape.num_ranks;
    const std::uint32_t experts = experts_per_rank(op_.shape);
#pragma unroll 1
    for (std::uint32_t i = team.thread(); i < at.rank_offsets; i += team.threads()) words[i] = shared.base[i];
#pragma unroll 1
    for (std::uint32_t i = team.thread(); i < experts; i += team.threads()) {
      words[at.expert_counts + i] = shared.ends[i * 2] - first_[i * ranks];
      words[at.expert_offsets + i] = first_[i * ranks];
      if (i == experts - 1) words[at.expert_offsets + experts] = shared.ends[i * 2 + 1];
    }
#pragma unroll 1
    for (std::uint32_t i = team.thread(); i < op_.shape.num_experts; i += team.threads()) {
      words[at.source_ranges + i * 2] = first_[i];
      words[at.source_ranges + i * 2 + 1] = count()[i];
    }
    if (team.warp() == team.warps - 1) write_rank_offsets(words + at.rank_offsets);
    team.sync();
  }

  // Returns M, the number of received rows. One warp calls.
  __device__ std::uint32_t num_rows(const std::uint32_t* ends) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    if (!op_.shape.expert_blocks) return ends[experts * 2 - 1];
    std::uint32_t rows = 0;
#pragma unroll 1
    for (std::uint32_t i = lane_of(); i < experts; i += 32)
      rows += ends[i * 2] - static_cast<std::uint32_t>(i * op_.shape.expert_capacity);
    return __reduce_add_sync(kFull, rows);
  }

 private:
  // The parts of place(). Layout expert: all threads of the team call, and each gets whether its experts have
  // room.
  __device__ bool place_blocks(const Team& team, std::uint32_t* ends) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    const auto capacity = static_cast<std::uint32_t>(op_.shape.expert_capacity);
    bool fits = true;
#pragma unroll 1
    for (std::uint32_t i = team.thread(); i < experts; i += team.threads()) {
      const std::uint32_t rows = begin_sources(i, i * capacity, ends, (i + 1) * capacity);
      if (rows <= capacity) continue;
      fits = false;
      fail_room(op_, op_.rank, static_cast<std::int32_t>(op_.rank * experts + i), rows);
    }
    return fits;
  }
  // Layout packed: one warp calls.
  __device__ bool place_packed(std::uint32_t* ends) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    std::uint32_t offset = 0;  // place of the next expert
#pragma unroll 1
    for (std::uint32_t begin = 0; begin < experts; begin += 32) {
      const std::uint32_t i = begin + lane_of();
      std::uint32_t total = 0;
#pragma unroll 1
      for (std::uint32_t s = 0; i < experts && s < op_.shape.num_ranks; ++s)
        total += count()[i * op_.shape.num_ranks + s];
      const std::uint32_t padded = round_up(total, op_.shape.alignment);
      const std::uint32_t end = offset + sum_lanes_up_to(padded);
      if (i < experts) begin_sources(i, end - padded, ends, end);
      offset = __shfl_sync(kFull, end, 31);
    }
    if (offset <= op_.shape.recv_rows) return true;
    if (lane_of() == 0) fail_room(op_, op_.rank, -1, offset);
    return false;
  }
  // The number of rows for each (local expert, source): [E/R,R].
  __device__ std::uint32_t* count() const {
    return first_ + op_.shape.num_experts;
  }
  // The set of tokens whose rows come from `source`: at most 16 words.
  __device__ std::uint32_t* set(std::uint32_t source) const {
    EPD_AT_MOST((op_.shape.num_experts + op_.shape.num_ranks + source) * op_.division.set_words,
                bits_words(op_));
    return sets_ + (op_.shape.num_experts + op_.shape.num_ranks + source) * op_.division.set_words;
  }
  // Waits for word i of those that the CTA collects. In usual groups there are as many metadata threads as
  // words, so each thread waits for one.
  __device__ bool collect_word(std::uint32_t i, std::uint64_t deadline_ns) const {
    std::uint32_t number = i / op_.shape.num_ranks_divisor;
    const std::uint32_t source = i - number * op_.shape.num_ranks;
    if (all_ == nullptr && number >= words_.counts_of(0)) number += op_.rank * words_.count_words;
    EPD_BELOW(number, words_.end);
    PublishedWord word{};
    const PublishedWord* const at = plan_words(op_, op_.rank, source) + number;
#pragma unroll 1
    for (std::uint32_t polls = 1; is_active(op_, source); ++polls) {
      word = read_word(at);
      if (word.tag == op_.tag) break;
      if (polls % 64 == 0 && must_leave(op_, deadline_ns, 1u << source)) return false;
    }
    take(source, number, word.value);
    return true;
  }
  // Stores one word of a plan message. `value` is 0 for an inactive source.
  __device__ void take(std::uint32_t source, std::uint32_t word, std::uint64_t value) const {
    EPD_BELOW(source, op_.shape.num_ranks);
    if (word == 0) {
      board_.tokens[source] = min(static_cast<std::uint32_t>(value), op_.inbox.max_tokens);
    } else if (word < words_.counts_of(0)) {
      std::uint32_t* const to = set(source) + (word - 1) * 2;
      EPD_BELOW((word - 1) * 2, op_.division.set_words);
      to[0] = static_cast<std::uint32_t>(value);
      if (word * 2 - 1 < op_.division.set_words) to[1] = static_cast<std::uint32_t>(value >> 32);
    } else {
      take_counts(source, word - words_.counts_of(0), value);
    }
  }
  // Stores a count word: four counts of 16 bits.
  __device__ void take_counts(std::uint32_t source, std::uint32_t place, std::uint64_t value) const {
    const std::uint32_t experts = experts_per_rank(op_.shape);
    const std::uint32_t rank = rank_of_count(op_, place);
    const std::uint32_t first = (place - rank * words_.count_words) * 4;
    EPD_BELOW(rank, op_.shape.num_ranks);
    EPD_AT_MOST(op_.shape.num_experts * 2, scratch_words(op_));
#pragma unroll 1
    for (std::uint32_t j = first; j < min(first + 4, experts); ++j, value >>= 16) {
      const std::uint32_t count = static_cast<std::uint16_t>(value);
      if (rank == op_.rank) this->count()[j * op_.shape.num_ranks + source] = count;
      if (all_ != nullptr) all_[source * op_.shape.num_experts + rank * experts + j] = count;
    }
  }

  // Sums up the rows for an expert over all sources, and over the sources below this rank.
  __device__ ColumnSum sum(std::uint32_t expert) const {
    ColumnSum rows;
#pragma unroll 1
    for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s) {
      const std::uint32_t count = all_[s * op_.shape.num_experts + expert];
      rows.total += count;
      if (s < op_.rank) rows.below += count;
    }
    return rows;
  }
  // Writes rank_offsets: prefix sums of the tokens of each source that come to this rank. One warp calls.
  __device__ void write_rank_offsets(std::int32_t* offsets) const {
    std::uint32_t tokens = 0;
#pragma unroll 1
    for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s) {
      if (lane_of() == 0) offsets[s] = static_cast<std::int32_t>(tokens);
      const std::uint32_t here = lane_of() < op_.division.set_words ? __popc(set(s)[lane_of()]) : 0;
      tokens += __reduce_add_sync(kFull, here);
    }
    if (lane_of() == 0) offsets[op_.shape.num_ranks] = static_cast<std::int32_t>(tokens);
  }
  // Sets the place of each source's rows for one expert, whose room is [begin, end). Returns the number of
  // rows.
  __device__ std::uint32_t begin_sources(std::uint32_t local, std::uint32_t begin, std::uint32_t* ends,
                                         std::uint32_t end) const {
    EPD_BELOW(local * 2 + 1, ends_words(op_));
    std::uint32_t at = begin;
#pragma unroll 1
    for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s) {
      first_[local * op_.shape.num_ranks + s] = at;
      at += count()[local * op_.shape.num_ranks + s];
    }
    ends[local * 2] = at;
    ends[local * 2 + 1] = end;
    return at - begin;
  }

  const Operation& op_;
  CtaBoard& board_;
  const abi::PlanWords& words_;
  std::uint32_t* const first_;    // [E/R,R] places, with count() after them
  std::uint32_t* const sets_;     // the sets of OwnChoices, with set() after them
  std::uint32_t* all_ = nullptr;  // CTA 0: [R,E] rows that each source sends to each expert
};

}  // namespace epd::kernels::cuda
