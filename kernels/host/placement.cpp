#include "kernels/routing.h"

#include <algorithm>

namespace epd::kernels {
namespace {

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Sums of columns [first, first + totals.size()) of a count matrix: over all sources, and over those below
// `rank`.
struct ColumnSums {
  std::vector<std::uint64_t> total;
  std::vector<std::uint64_t> below;

  ColumnSums(std::span<const std::uint32_t* const> rows, std::uint32_t first, std::uint32_t columns,
             std::uint32_t rank)
      : total(columns, 0) {
    for (std::uint32_t source = 0; source < rows.size(); ++source) {
      if (source == rank) below = total;
      if (rows[source] == nullptr) continue;
      for (std::uint32_t i = 0; i < columns; ++i) total[i] += rows[source][first + i];
    }
  }
};

}  // namespace

void Placement::reset(std::uint32_t num_ranks, std::uint32_t num_experts, bool per_expert) {
  num_ranks_ = num_ranks;
  experts_ = num_experts / num_ranks;
  per_expert_ = per_expert;
  num_targets_ = per_expert ? num_experts : num_ranks;
  num_recv_rows = 0;
  std::size_t words = std::size_t{num_targets_} + num_ranks + 1 + experts_;
  if (per_expert) words += experts_ + 1 + std::size_t{experts_} * num_ranks * 2;
  words_.assign(words, 0);
}

std::span<const std::int32_t> Placement::rank_offsets() const {
  return section(num_targets_, num_ranks_ + 1);
}

std::span<const std::int32_t> Placement::expert_counts() const {
  return section(std::size_t{num_targets_} + num_ranks_ + 1, experts_);
}

std::span<const std::int32_t> Placement::expert_offsets() const {
  return per_expert_ ? section(std::size_t{num_targets_} + num_ranks_ + 1 + experts_, experts_ + 1)
                     : std::span<const std::int32_t>();
}

std::span<const std::int32_t> Placement::source_ranges() const {
  return per_expert_ ? section(std::size_t{num_targets_} + num_ranks_ + 2 + 2 * std::size_t{experts_},
                               std::size_t{experts_} * num_ranks_ * 2)
                     : std::span<const std::int32_t>();
}

struct PlacementBuilder {
  const PlacementRules& rules;
  const PlacementCounts& counts;
  std::uint32_t rank;
  Placement& placement;
  std::uint32_t experts = rules.num_experts / rules.num_ranks;  // of one rank

  // The sections of `placement`, to write.
  std::span<std::int32_t> writable(std::span<const std::int32_t> section) const {
    return placement.words().subspan(static_cast<std::size_t>(section.data() - placement.words().data()),
                                     section.size());
  }

  void place_sources() const {
    const std::span<std::int32_t> offsets = writable(placement.rank_offsets());
    for (std::uint32_t source = 0; source < rules.num_ranks; ++source) {
      const std::uint32_t* row = counts.rank_counts[source];
      offsets[source + 1] = offsets[source] + static_cast<std::int32_t>(row == nullptr ? 0 : row[rank]);
    }
  }

  PlacementError place_compact() const {
    const ColumnSums rows(counts.rank_counts, 0, rules.num_ranks, rank);
    for (std::uint32_t d = 0; d < rules.num_ranks; ++d) {
      if (rows.total[d] > rules.recv_rows) return {true, d, -1, rows.total[d], rules.recv_rows};
    }
    std::copy(rows.below.begin(), rows.below.end(), writable(placement.base()).begin());
    const ColumnSums selections(counts.expert_counts, rank * experts, experts, rank);
    std::transform(
        selections.total.begin(), selections.total.end(), writable(placement.expert_counts()).begin(),
        [this](std::uint64_t count) { return static_cast<std::int32_t>(round_up(count, rules.alignment)); });
    placement.num_recv_rows = static_cast<std::uint32_t>(rows.total[rank]);
    return {};
  }

  // Where each expert of `d` begins in recv_x, and the end of the last.
  std::vector<std::uint64_t> offsets_at(const ColumnSums& rows, std::uint32_t d) const {
    std::vector<std::uint64_t> offsets(experts + 1, 0);
    for (std::uint32_t i = 0; i < experts; ++i) {
      offsets[i + 1] = rules.expert_blocks
                           ? (i + 1) * rules.expert_capacity
                           : round_up(offsets[i] + rows.total[d * experts + i], rules.alignment);
    }
    return offsets;
  }

  PlacementError check_room(const ColumnSums& rows) const {
    for (std::uint32_t e = 0; rules.expert_blocks && e < rules.num_experts; ++e) {
      if (rows.total[e] <= rules.expert_capacity) continue;
      return {true, e / experts, static_cast<std::int32_t>(e), rows.total[e], rules.expert_capacity};
    }
    for (std::uint32_t d = 0; !rules.expert_blocks && d < rules.num_ranks; ++d) {
      const std::uint64_t end = offsets_at(rows, d).back();
      if (end > rules.recv_rows) return {true, d, -1, end, rules.recv_rows};
    }
    return {};
  }

  void place_ranges(std::uint32_t expert, std::uint64_t offset, std::int32_t* range) const {
    for (std::uint32_t source = 0; source < rules.num_ranks; ++source) {
      const std::uint32_t* row = counts.expert_counts[source];
      const std::uint32_t count = row == nullptr ? 0 : row[expert];
      *range++ = static_cast<std::int32_t>(offset);
      *range++ = static_cast<std::int32_t>(count);
      offset += count;
    }
  }

  PlacementError place_experts() const {
    const ColumnSums rows(counts.expert_counts, 0, rules.num_experts, rank);
    const PlacementError error = check_room(rows);
    if (error.bad) return error;
    const std::span<std::int32_t> base = writable(placement.base());
    for (std::uint32_t d = 0; d < rules.num_ranks; ++d) {
      const std::vector<std::uint64_t> offsets = offsets_at(rows, d);
      for (std::uint32_t i = 0; i < experts; ++i) {
        base[d * experts + i] = static_cast<std::int32_t>(offsets[i] + rows.below[d * experts + i]);
      }
      if (d == rank) place_own(rows, offsets);
    }
    return {};
  }

  void place_own(const ColumnSums& rows, const std::vector<std::uint64_t>& offsets) const {
    std::copy(offsets.begin(), offsets.end(), writable(placement.expert_offsets()).begin());
    const std::span<std::int32_t> own_counts = writable(placement.expert_counts());
    const std::span<std::int32_t> ranges = writable(placement.source_ranges());
    std::uint64_t received = 0;
    for (std::uint32_t i = 0; i < experts; ++i) {
      const std::uint64_t count = rows.total[rank * experts + i];
      own_counts[i] = static_cast<std::int32_t>(count);
      received += count;
      place_ranges(rank * experts + i, offsets[i], &ranges[std::size_t{i} * rules.num_ranks * 2]);
    }
    placement.num_recv_rows = static_cast<std::uint32_t>(rules.expert_blocks ? received : offsets.back());
  }
};

PlacementError place_rows(const PlacementRules& rules, const PlacementCounts& counts, std::uint32_t rank,
                          Placement& placement) {
  placement.reset(rules.num_ranks, rules.num_experts, rules.per_expert);
  const PlacementBuilder builder{rules, counts, rank, placement};
  const PlacementError error = rules.per_expert ? builder.place_experts() : builder.place_compact();
  if (!error.bad) builder.place_sources();
  return error;
}

std::vector<RowRange> unfilled_rows(const PlacementRules& rules, const Placement& placement, bool all) {
  std::vector<RowRange> ranges;
  const auto add = [&](std::uint64_t begin, std::uint64_t end) {
    if (begin >= end) return;
    if (!ranges.empty() && ranges.back().begin + ranges.back().count == begin) {
      ranges.back().count += static_cast<std::uint32_t>(end - begin);
    } else {
      ranges.push_back({static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end - begin)});
    }
  };
  if (rules.per_expert && (all || !rules.expert_blocks)) {
    const std::span<const std::int32_t> offsets = placement.expert_offsets();
    for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
      const auto begin = static_cast<std::uint64_t>(offsets[e]);
      const auto filled = static_cast<std::uint64_t>(placement.expert_counts()[e]);
      add(begin + filled, static_cast<std::uint64_t>(offsets[e + 1]));
    }
  }
  if (all && !rules.expert_blocks) add(placement.num_recv_rows, rules.recv_rows);
  return ranges;
}

}  // namespace epd::kernels
