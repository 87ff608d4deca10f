#include "kernels/routing.h"
#include "proto/exchange.h"

#include <algorithm>
#include <numeric>

namespace epd::kernels {
namespace {

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

void Placement::reset(std::uint32_t num_ranks, std::uint32_t num_experts, bool per_expert) {
  num_ranks_ = num_ranks;
  experts_ = num_experts / num_ranks;
  per_expert_ = per_expert;
  num_targets_ = per_expert ? num_experts : num_ranks;
  num_recv_rows = 0;
  words_.assign(abi::placement_words(num_ranks, num_experts, per_expert), 0);
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

void Placement::write_source_ranges(bool packed, std::int32_t* to) const {
  const std::span<const std::int32_t> ranges = source_ranges();
  if (!packed) {
    std::copy(ranges.begin(), ranges.end(), to);
    return;
  }
  for (std::size_t i = 0; i < ranges.size(); i += 2) {
    const std::int32_t first = ranges[i] - expert_offsets()[i / 2 / num_ranks_];
    to[i] = ranges[i + 1];  // the low half of an int64
    to[i + 1] = first;
  }
}

void Placement::count_rows(bool expert_blocks) {
  std::int64_t rows = per_expert_ ? expert_offsets().back() : rank_offsets().back();
  if (expert_blocks) rows = std::accumulate(expert_counts().begin(), expert_counts().end(), std::int64_t{0});
  num_recv_rows = static_cast<std::uint32_t>(rows);
}

void RowPlacer::ColumnSums::add(const std::uint32_t* columns) {
  for (std::size_t i = 0; i < total.size(); ++i) total[i] += columns[i];
}

void SourcePlaces::reset(std::uint32_t num_ranks, std::uint32_t num_experts, bool per_expert) {
  const std::uint32_t targets = per_expert ? num_experts : num_ranks;
  base.assign(targets, 0);
  counts.assign(targets, 0);
}

void SourcePlaces::take(std::uint32_t rank, const Placement& at_rank) {
  const std::span<const std::int32_t> offsets = at_rank.rank_offsets();
  const std::span<const std::int32_t> ranges = at_rank.source_ranges();
  if (ranges.empty()) {
    base[rank] = offsets[source];
    counts[rank] = static_cast<std::uint32_t>(offsets[source + 1] - offsets[source]);
    return;
  }
  const std::size_t experts = at_rank.expert_counts().size();
  for (std::size_t i = 0; i < experts; ++i) {
    const std::size_t range = (i * (offsets.size() - 1) + source) * 2;
    base[rank * experts + i] = ranges[range];
    counts[rank * experts + i] = static_cast<std::uint32_t>(ranges[range + 1]);
  }
}

RowPlacer::RowPlacer(const PlacementRules& rules, const PlacementCounts& counts, std::uint32_t rank,
                     Placement& placement, std::span<SourcePlaces> others)
    : rules_(rules),
      counts_(counts),
      rank_(rank),
      placement_(placement),
      experts_(rules.num_experts / rules.num_ranks),
      others_(others) {
  placement.reset(rules.num_ranks, rules.num_experts, rules.per_expert);
  for (SourcePlaces& other : others) other.reset(rules.num_ranks, rules.num_experts, rules.per_expert);
  rows_.total.assign(rules.per_expert ? rules.num_experts : rules.num_ranks, 0);
  if (!rules.per_expert) selections_.total.assign(experts_, 0);
}

bool RowPlacer::advance(std::uint32_t sources) {
  for (; sources > 0 && source_ < rules_.num_ranks; --sources) take_in(source_++);
  if (source_ < rules_.num_ranks) return false;
  error_ = place();
  return true;
}

// Returns a section of the placement for writing.
std::span<std::int32_t> RowPlacer::writable(std::span<const std::int32_t> section) const {
  return placement_.words().subspan(static_cast<std::size_t>(section.data() - placement_.words().data()),
                                    section.size());
}

void RowPlacer::take_in(std::uint32_t source) {
  if (source == rank_) rows_.below = rows_.total;
  if (next_other_ < others_.size() && others_[next_other_].source == source)
    note_other(others_[next_other_++]);
  const std::uint32_t* tokens = counts_.rank_counts[source];
  const std::uint32_t* experts = counts_.expert_counts[source];
  const std::span<std::int32_t> offsets = writable(placement_.rank_offsets());
  offsets[source + 1] = offsets[source];
  if (tokens == nullptr) return;
  offsets[source + 1] += static_cast<std::int32_t>(tokens[rank_]);
  const std::uint32_t* own = experts + std::size_t{rank_} * experts_;
  if (!rules_.per_expert) {
    rows_.add(tokens);
    selections_.add(own);
    return;
  }
  rows_.add(experts);
  const std::span<std::int32_t> ranges = writable(placement_.source_ranges());
  for (std::size_t i = 0; i < experts_; ++i)
    ranges[(i * rules_.num_ranks + source) * 2 + 1] = static_cast<std::int32_t>(own[i]);
}

// Notes another source's counts, and the rows of the sources below it.
void RowPlacer::note_other(SourcePlaces& other) const {
  const std::uint32_t* counts =
      rules_.per_expert ? counts_.expert_counts[other.source] : counts_.rank_counts[other.source];
  if (counts == nullptr) return;
  const std::size_t targets = rules_.per_expert ? experts_ : 1;  // of a rank
  for (std::uint32_t d = 0; d < rules_.num_ranks; ++d) {
    if (!is_destination(d)) continue;
    for (std::size_t i = d * targets; i < (d + 1) * targets; ++i) {
      other.base[i] = static_cast<std::int32_t>(rows_.total[i]);
      other.counts[i] = counts[i];
    }
  }
}

PlacementError RowPlacer::place() const {
  return rules_.per_expert ? place_experts() : place_compact();
}

PlacementError RowPlacer::place_compact() const {
  const std::span<std::int32_t> base = writable(placement_.base());
  for (std::uint32_t d = 0; d < rules_.num_ranks; ++d) {
    if (!is_destination(d)) continue;
    if (rows_.total[d] > rules_.recv_rows) return {true, d, -1, rows_.total[d], rules_.recv_rows};
    base[d] = static_cast<std::int32_t>(rows_.below[d]);
  }
  std::transform(
      selections_.total.begin(), selections_.total.end(), writable(placement_.expert_counts()).begin(),
      [this](std::uint64_t count) { return static_cast<std::int32_t>(round_up(count, rules_.alignment)); });
  placement_.num_recv_rows = static_cast<std::uint32_t>(rows_.total[rank_]);
  return {};
}

// Returns where each expert of rank `d` begins in recv_x, and the end of the last one.
std::vector<std::uint64_t> RowPlacer::offsets_at(std::uint32_t d) const {
  std::vector<std::uint64_t> offsets(experts_ + 1, 0);
  for (std::uint32_t i = 0; i < experts_; ++i) {
    offsets[i + 1] = rules_.expert_blocks
                         ? (i + 1) * rules_.expert_capacity
                         : round_up(offsets[i] + rows_.total[d * experts_ + i], rules_.alignment);
  }
  return offsets;
}

PlacementError RowPlacer::check_room() const {
  for (std::uint32_t e = 0; rules_.expert_blocks && e < rules_.num_experts; ++e) {
    if (rows_.total[e] <= rules_.expert_capacity || !is_destination(e / experts_)) continue;
    return {true, e / experts_, static_cast<std::int32_t>(e), rows_.total[e], rules_.expert_capacity};
  }
  for (std::uint32_t d = 0; !rules_.expert_blocks && d < rules_.num_ranks; ++d) {
    if (!is_destination(d)) continue;
    const std::uint64_t end = offsets_at(d).back();
    if (end > rules_.recv_rows) return {true, d, -1, end, rules_.recv_rows};
  }
  return {};
}

PlacementError RowPlacer::place_experts() const {
  const PlacementError error = check_room();
  if (error.bad) return error;
  const std::span<std::int32_t> base = writable(placement_.base());
  for (std::uint32_t d = 0; d < rules_.num_ranks; ++d) {
    if (!is_destination(d)) continue;
    const std::vector<std::uint64_t> offsets = offsets_at(d);
    for (std::uint32_t i = 0; i < experts_; ++i) {
      const std::size_t expert = std::size_t{d} * experts_ + i;
      base[expert] = static_cast<std::int32_t>(offsets[i] + rows_.below[expert]);
      for (SourcePlaces& other : others_) other.base[expert] += static_cast<std::int32_t>(offsets[i]);
    }
    if (d == rank_) place_own(offsets);
  }
  return {};
}

// Completes what this rank receives. take_in() has set the lengths of source_ranges; this sets where they
// begin.
void RowPlacer::place_own(const std::vector<std::uint64_t>& offsets) const {
  std::copy(offsets.begin(), offsets.end(), writable(placement_.expert_offsets()).begin());
  const std::span<std::int32_t> own_counts = writable(placement_.expert_counts());
  const std::span<std::int32_t> ranges = writable(placement_.source_ranges());
  std::uint64_t received = 0;
  for (std::uint32_t i = 0; i < experts_; ++i) {
    const std::uint64_t count = rows_.total[rank_ * experts_ + i];
    own_counts[i] = static_cast<std::int32_t>(count);
    received += count;
    auto begin = static_cast<std::int32_t>(offsets[i]);
    std::int32_t* range = &ranges[std::size_t{i} * rules_.num_ranks * 2];
    for (std::uint32_t source = 0; source < rules_.num_ranks; ++source, range += 2) {
      range[0] = begin;
      begin += range[1];
    }
  }
  placement_.num_recv_rows = static_cast<std::uint32_t>(rules_.expert_blocks ? received : offsets.back());
}

PlacementError place_rows(const PlacementRules& rules, const PlacementCounts& counts, std::uint32_t rank,
                          Placement& placement) {
  RowPlacer placer(rules, counts, rank, placement);
  placer.advance(rules.num_ranks);
  return placer.error();
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
