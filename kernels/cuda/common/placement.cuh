// Computes the places of rows from all ranks' counts, as kernels::place_rows does. Each CTA computes for
// itself.
#pragma once

#include "cuda/common/routing.cuh"

namespace epd::kernels::cuda {

// The rows that all ranks send to one target, and the part of them from ranks below a given one.
struct ColumnSum {
  std::uint32_t total = 0;
  std::uint32_t below = 0;
};

// Adds up one column of a count matrix [R,columns] over all active ranks. `below` counts the ranks below
// `rank`.
__device__ inline ColumnSum sum_column(const Operation& op, const std::uint32_t* matrix,
                                       std::uint32_t columns, std::uint32_t column, std::uint32_t rank) {
  EPD_BELOW(column, columns);
  ColumnSum sum;
#pragma unroll 4
  for (std::uint32_t source = 0; source < op.shape.num_ranks; ++source) {
    if (!is_active(op, source)) continue;
    const std::uint32_t count = __ldcg(matrix + source * columns + column);
    sum.total += count;
    if (source < rank) sum.below += count;
  }
  return sum;
}
__device__ inline ColumnSum rank_column(const Operation& op, std::uint32_t column, std::uint32_t rank) {
  return sum_column(op, op.peers[op.rank].rank_counts, op.shape.num_ranks, column, rank);
}
__device__ inline ColumnSum expert_column(const Operation& op, std::uint32_t column, std::uint32_t rank) {
  return sum_column(op, op.peers[op.rank].expert_counts, op.shape.num_experts, column, rank);
}

__device__ inline std::uint32_t round_up(std::uint32_t value, std::uint32_t multiple) {
  return multiple == 1 ? value : (value + multiple - 1) / multiple * multiple;
}

// Fails the operation: `rank` (or its expert, if not -1) would receive `rows` rows, which is more than its
// room.
__device__ __noinline__ inline void fail_room(const Operation& op, std::uint32_t rank, std::int32_t expert,
                                              std::uint64_t rows) {
  OpResult ending = ended(OpError::kNoRoom, static_cast<std::int32_t>(rank));
  ending.expert = expert;
  ending.rows = rows;
  ending.room = expert < 0 ? op.shape.recv_rows : op.shape.expert_capacity;
  fail(op, ending);
}

// Each of these functions adds the place of this rank's first row at each target to `base`. All threads of
// the team get whether all ranks have enough room.
__device__ inline bool place_ranks(const Operation& op, const Shared& shared, const Team& team) {
  bool fits = true;
  const std::uint32_t ranks = op.shape.num_ranks;
#pragma unroll 1
  for (std::uint32_t i = team.thread(); i < op.division.ctas * ranks; i += team.threads()) {
    const std::uint32_t d = i % ranks;
    const ColumnSum rows = rank_column(op, d, op.rank);
    EPD_BELOW(i, base_words(op));
    shared.base[i] += rows.below;
    if (rows.total <= op.shape.recv_rows) continue;
    fits = false;
    fail_room(op, d, -1, rows.total);
  }
  return team.all(fits);
}

// Layout expert: expert i of a rank begins at row i * expert_capacity.
__device__ inline bool place_blocks(const Operation& op, const Shared& shared, const Team& team) {
  const std::uint32_t experts = experts_per_rank(op.shape);
  bool fits = true;
#pragma unroll 1
  for (std::uint32_t e = team.thread(); e < op.shape.num_experts; e += team.threads()) {
    const ColumnSum rows = expert_column(op, e, op.rank);
    const auto offset = static_cast<std::uint32_t>(e % experts * op.shape.expert_capacity);
    EPD_BELOW(e, base_words(op));
    EPD_BELOW(e % experts * 2 + 1, ends_words(op));
    shared.base[e] += offset + rows.below;
    if (e / experts == op.rank) {
      shared.ends[e % experts * 2] = offset + rows.total;
      shared.ends[e % experts * 2 + 1] = offset + static_cast<std::uint32_t>(op.shape.expert_capacity);
    }
    if (rows.total <= op.shape.expert_capacity) continue;
    fits = false;
    fail_room(op, e / experts, static_cast<std::int32_t>(e), rows.total);
  }
  return team.all(fits);
}

// Layout packed: the experts of a rank follow each other. Each expert begins at a multiple of the alignment,
// so a place is a prefix sum of rounded counts. One warp computes one rank.
__device__ inline bool place_packed(const Operation& op, const Shared& shared, const Team& team) {
  const std::uint32_t experts = experts_per_rank(op.shape);
  bool fits = true;
#pragma unroll 1
  for (std::uint32_t d = team.warp(); d < op.shape.num_ranks; d += team.warps) {
    std::uint32_t offset = 0;
#pragma unroll 1
    for (std::uint32_t first = 0; first < experts; first += 32) {
      const std::uint32_t i = first + lane_of();
      const ColumnSum rows = i < experts ? expert_column(op, d * experts + i, op.rank) : ColumnSum{};
      const std::uint32_t padded = round_up(rows.total, op.shape.alignment);
      const std::uint32_t end = sum_lanes_up_to(padded);
      if (i < experts) EPD_BELOW(d * experts + i, base_words(op));
      if (i < experts) EPD_BELOW(i * 2 + 1, ends_words(op));
      if (i < experts) shared.base[d * experts + i] += offset + end - padded + rows.below;
      if (i < experts && d == op.rank) {
        shared.ends[i * 2] = offset + end - padded + rows.total;
        shared.ends[i * 2 + 1] = offset + end;
      }
      offset += __shfl_sync(kFull, end, 31);
    }
    if (offset <= op.shape.recv_rows) continue;
    fits = false;
    if (lane_of() == 0) fail_room(op, d, -1, offset);
  }
  return team.all(fits);
}

// Turns `base` into the CTA's first row for each target. All ranks' counts must be visible. Returns false if
// the operation has failed.
__device__ inline bool place_rows(const Operation& op, const Shared& shared, const Team& team) {
  if (!op.shape.per_expert) return place_ranks(op, shared, team);
  return op.shape.expert_blocks ? place_blocks(op, shared, team) : place_packed(op, shared, team);
}

// The offsets of a placement's sections in words, as kernels::Placement has them.
struct PlacementSections {
  std::uint32_t rank_offsets;
  std::uint32_t expert_counts;
  std::uint32_t expert_offsets;
  std::uint32_t source_ranges;
  std::uint32_t end;

  __device__ explicit PlacementSections(const Shape& shape) {
    const std::uint32_t experts = experts_per_rank(shape);
    rank_offsets = num_targets(shape);
    expert_counts = rank_offsets + shape.num_ranks + 1;
    expert_offsets = expert_counts + experts;
    source_ranges = expert_offsets + (shape.per_expert ? experts + 1 : 0);
    end = source_ranges + (shape.per_expert ? experts * shape.num_ranks * 2 : 0);
  }
};

// Writes the rank's placement into the routing record. Only CTA 0 calls: its `base` is the base of the whole
// rank.
__device__ inline void record_placement(const Operation& op, const Shared& shared, const Team& team) {
  const PlacementSections at(op.shape);
  std::int32_t* const words = op.routing.placement;
  const std::uint32_t ranks = op.shape.num_ranks;
  const std::uint32_t experts = experts_per_rank(op.shape);
  EPD_AT_MOST(at.rank_offsets, base_words(op));
#pragma unroll 1
  for (std::uint32_t i = team.thread(); i < at.rank_offsets; i += team.threads()) words[i] = shared.base[i];
#pragma unroll 1
  for (std::uint32_t s = team.thread(); s <= ranks; s += team.threads()) {
    words[at.rank_offsets + s] = rank_column(op, op.rank, s).below;
  }
#pragma unroll 1
  for (std::uint32_t i = team.thread(); i < experts; i += team.threads()) {
    const std::uint32_t e = op.rank * experts + i;
    const std::uint32_t total = expert_column(op, e, 0).total;
    words[at.expert_counts + i] = op.shape.per_expert ? total : round_up(total, op.shape.alignment);
    if (!op.shape.per_expert) continue;
    std::uint32_t row = shared.ends[i * 2] - total;
    words[at.expert_offsets + i] = row;
    if (i == experts - 1) words[at.expert_offsets + experts] = shared.ends[i * 2 + 1];
#pragma unroll 1
    for (std::uint32_t s = 0; s < ranks; ++s) {
      const std::uint32_t count =
          is_active(op, s) ? __ldcg(op.peers[op.rank].expert_counts + s * op.shape.num_experts + e) : 0;
      EPD_BELOW(at.source_ranges + (i * ranks + s) * 2 + 1, at.end);
      EPD_AT_MOST(row + count, op.shape.recv_rows);
      words[at.source_ranges + (i * ranks + s) * 2] = row;
      words[at.source_ranges + (i * ranks + s) * 2 + 1] = count;
      row += count;
    }
  }
  team.sync();
}

// Delivers a placement to the client's arrays and to the CPU, and copies it to `record` if that is not null.
// Only CTA 0 calls.
__device__ inline void deliver_words(const Operation& op, const Team& team, const std::int32_t* words,
                                     std::int32_t* record) {
  const PlacementSections at(op.shape);
#pragma unroll 1
  for (std::uint32_t i = team.thread(); i < at.end; i += team.threads()) {
    const std::int32_t word = words[i];
    if (record != nullptr) record[i] = word;
    if (op.counts.host_words != nullptr)
      store_relaxed_system(op.counts.host_words + i,
                           std::uint64_t{op.counts.mark} << 32 | static_cast<std::uint32_t>(word));
    if (i < at.rank_offsets) continue;
    std::int32_t* to = op.counts.rank_offsets;
    std::uint32_t first = at.rank_offsets;
    if (i >= at.expert_counts) to = op.counts.expert_counts, first = at.expert_counts;
    if (i >= at.expert_offsets) to = op.counts.expert_offsets, first = at.expert_offsets;
    if (i >= at.source_ranges) to = op.counts.source_ranges, first = at.source_ranges;
    if (to == nullptr) continue;
    if (i >= at.source_ranges && op.shape.packed_ranges) {
      // The number of rows becomes the low half, and the first row the high one, from the expert's on.
      const std::uint32_t pair = (i - first) / 2;
      const bool is_count = (i - first) % 2 != 0;
      const std::int32_t begin = words[at.expert_offsets + pair / op.shape.num_ranks];
      to[(i - first) ^ 1] = is_count ? word : word - begin;
    } else {
      to[i - first] = word;
    }
  }
}

// Delivers the recorded placement. Only CTA 0 calls.
__device__ inline void deliver_counts(const Operation& op, const Team& team) {
  deliver_words(op, team, op.routing.placement, nullptr);
}

// Returns M, the number of received rows, of the recorded placement.
__device__ inline std::uint32_t num_recv_rows(const Operation& op) {
  const PlacementSections at(op.shape);
  const std::int32_t* const words = op.routing.placement;
  if (!op.shape.per_expert) return __ldcg(words + at.rank_offsets + op.shape.num_ranks);
  if (!op.shape.expert_blocks) return __ldcg(words + at.expert_offsets + experts_per_rank(op.shape));
  std::uint32_t rows = 0;
#pragma unroll 8
  for (std::uint32_t i = at.expert_counts; i < at.expert_offsets; ++i) rows += __ldcg(words + i);
  return rows;
}

}  // namespace epd::kernels::cuda
