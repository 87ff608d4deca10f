// Properties of places over random counts: everybody's rows together fill what the offsets say, each once,
// ordered by source; and all ranks refuse the same.
#include "kernels/routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace epd::kernels {
namespace {

std::uint32_t between(std::mt19937& random, std::uint32_t low, std::uint32_t high) {
  return std::uniform_int_distribution<std::uint32_t>(low, high)(random);
}

struct Counts {
  std::vector<std::vector<std::uint32_t>> ranks;    // [R,R]
  std::vector<std::vector<std::uint32_t>> experts;  // [R,E]
  std::vector<const std::uint32_t*> rank_rows;      // null: not there
  std::vector<const std::uint32_t*> expert_rows;

  PlacementCounts view() const { return {rank_rows, expert_rows}; }
  std::uint64_t column(const std::vector<const std::uint32_t*>& rows, std::uint32_t i,
                       std::uint32_t below) const {
    std::uint64_t sum = 0;
    for (std::uint32_t source = 0; source < below; ++source)
      sum += rows[source] == nullptr ? 0 : rows[source][i];
    return sum;
  }
  std::uint64_t to_rank(std::uint32_t d) const {
    return column(rank_rows, d, static_cast<std::uint32_t>(ranks.size()));
  }
  std::uint64_t to_expert(std::uint32_t e) const {
    return column(expert_rows, e, static_cast<std::uint32_t>(ranks.size()));
  }
};

PlacementRules random_rules(std::mt19937& random) {
  PlacementRules rules;
  rules.num_ranks = between(random, 0, 9) == 0 ? between(random, 60, 130) : between(random, 1, 9);
  rules.num_experts = rules.num_ranks * between(random, 1, 9);
  rules.per_expert = between(random, 0, 2) != 0;
  rules.expert_blocks = rules.per_expert && between(random, 0, 1) == 0;
  rules.alignment = rules.expert_blocks || between(random, 0, 1) == 0 ? 1 : between(random, 1, 256);
  rules.expert_capacity = rules.expert_blocks ? 100000 : 0;
  rules.recv_rows =
      rules.expert_blocks ? rules.num_experts / rules.num_ranks * rules.expert_capacity : 10000000;
  return rules;
}

Counts random_counts(std::mt19937& random, const PlacementRules& rules) {
  Counts counts;
  const std::uint32_t most = between(random, 0, 3) == 0 ? 0 : between(random, 1, 60);
  const bool some_away = between(random, 0, 2) == 0;
  const auto row = [&](std::uint32_t columns) {
    std::vector<std::uint32_t> values(columns);
    for (auto& value : values) value = between(random, 0, 2) == 0 ? 0 : between(random, 0, most);
    return values;
  };
  for (std::uint32_t r = 0; r < rules.num_ranks; ++r) {
    counts.ranks.push_back(row(rules.num_ranks));
    counts.experts.push_back(row(rules.num_experts));
  }
  for (std::uint32_t r = 0; r < rules.num_ranks; ++r) {
    const bool away = some_away && between(random, 0, 3) == 0;
    counts.rank_rows.push_back(away ? nullptr : counts.ranks[r].data());
    counts.expert_rows.push_back(away ? nullptr : counts.experts[r].data());
  }
  return counts;
}

std::vector<Placement> place_all(const PlacementRules& rules, const Counts& counts) {
  std::vector<Placement> placements(rules.num_ranks);
  for (std::uint32_t r = 0; r < rules.num_ranks; ++r) {
    if (r % 2 == 0) {
      EXPECT_FALSE(place_rows(rules, counts.view(), r, placements[r]).bad);
      continue;
    }
    RowPlacer placer(rules, counts.view(), r, placements[r]);  // the same in pieces
    while (!placer.advance(1 + r % 3)) {
    }
    EXPECT_FALSE(placer.error().bad);
  }
  return placements;
}

// Marks the rows of (source, target) in recv_x of the target's rank.
void mark(std::vector<std::int32_t>& owners, std::size_t first, std::uint32_t count, std::int32_t owner) {
  ASSERT_LE(first + count, owners.size());
  for (std::size_t i = first; i < first + count; ++i) {
    ASSERT_EQ(owners[i], -1) << "row " << i << " has two owners";
    owners[i] = owner;
  }
}

void expect_sources(const PlacementRules& rules, const Counts& counts, const Placement& placement,
                    std::uint32_t rank) {
  ASSERT_EQ(placement.rank_offsets().size(), rules.num_ranks + 1);
  for (std::uint32_t s = 0; s <= rules.num_ranks; ++s) {
    EXPECT_EQ(static_cast<std::uint64_t>(placement.rank_offsets()[s]),
              counts.column(counts.rank_rows, rank, s));
  }
}

void expect_compact(const PlacementRules& rules, const Counts& counts,
                    const std::vector<Placement>& placements, std::uint32_t d) {
  const Placement& own = placements[d];
  std::vector<std::int32_t> owners(counts.to_rank(d), -1);
  ASSERT_EQ(own.num_recv_rows, owners.size());
  for (std::uint32_t s = 0; s < rules.num_ranks; ++s) {
    if (counts.rank_rows[s] == nullptr) continue;
    mark(owners, static_cast<std::size_t>(placements[s].base()[d]), counts.ranks[s][d], static_cast<int>(s));
  }
  EXPECT_TRUE(std::is_sorted(owners.begin(), owners.end()));
  EXPECT_EQ(std::count(owners.begin(), owners.end(), -1), 0);
  const std::uint32_t experts = rules.num_experts / rules.num_ranks;
  ASSERT_EQ(own.expert_counts().size(), experts);
  for (std::uint32_t i = 0; i < experts; ++i) {
    const std::uint64_t selections = counts.to_expert(d * experts + i);
    const auto padded = static_cast<std::uint64_t>(own.expert_counts()[i]);
    EXPECT_EQ(padded % rules.alignment, 0u);
    EXPECT_GE(padded, selections);
    EXPECT_LT(padded, selections + rules.alignment);
  }
  EXPECT_TRUE(own.expert_offsets().empty());
  EXPECT_TRUE(own.source_ranges().empty());
}

void expect_offsets(const PlacementRules& rules, const Placement& own) {
  const std::span<const std::int32_t> offsets = own.expert_offsets();
  EXPECT_EQ(offsets[0], 0);
  std::uint64_t rows = 0;
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    rows += static_cast<std::uint64_t>(own.expert_counts()[i]);
    const std::int32_t step = offsets[i + 1] - offsets[i];
    if (rules.expert_blocks) {
      EXPECT_EQ(static_cast<std::uint64_t>(step), rules.expert_capacity);
      continue;
    }
    EXPECT_EQ(static_cast<std::uint32_t>(offsets[i + 1]) % rules.alignment, 0u);
    EXPECT_GE(step, own.expert_counts()[i]);
    EXPECT_LT(static_cast<std::uint32_t>(step),
              static_cast<std::uint32_t>(own.expert_counts()[i]) + rules.alignment);
  }
  EXPECT_EQ(own.num_recv_rows, rules.expert_blocks ? rows : static_cast<std::uint64_t>(offsets.back()));
}

// As the client gets them: the words of the placement, or int64 that count from the expert's first row.
void expect_written_ranges(const PlacementRules& rules, const Placement& own) {
  std::vector<std::int32_t> rows(own.source_ranges().size(), -5);
  own.write_source_ranges(false, rows.data());
  EXPECT_TRUE(std::equal(rows.begin(), rows.end(), own.source_ranges().begin(), own.source_ranges().end()));
  std::vector<std::int64_t> packed(rows.size() / 2, -5);
  own.write_source_ranges(true, reinterpret_cast<std::int32_t*>(packed.data()));
  for (std::size_t i = 0; i < packed.size(); ++i) {
    const std::int64_t first = rows[2 * i] - own.expert_offsets()[i / rules.num_ranks];
    ASSERT_EQ(packed[i], first << 32 | rows[2 * i + 1]) << i;
  }
}

// Rows of each expert: first to last without holes, by source; the rest is what unfilled_rows says.
void expect_per_expert(const PlacementRules& rules, const Counts& counts,
                       const std::vector<Placement>& placements, std::uint32_t d) {
  const Placement& own = placements[d];
  const std::uint32_t experts = rules.num_experts / rules.num_ranks;
  ASSERT_EQ(own.expert_offsets().size(), experts + 1);
  expect_offsets(rules, own);
  expect_written_ranges(rules, own);
  for (std::uint32_t i = 0; i < experts; ++i) {
    const std::uint32_t e = d * experts + i;
    std::vector<std::int32_t> owners(counts.to_expert(e), -1);
    ASSERT_EQ(static_cast<std::size_t>(own.expert_counts()[i]), owners.size());
    for (std::uint32_t s = 0; s < rules.num_ranks; ++s) {
      const std::int32_t* range = &own.source_ranges()[(std::size_t{i} * rules.num_ranks + s) * 2];
      if (counts.expert_rows[s] == nullptr) {
        EXPECT_EQ(range[1], 0);
        continue;
      }
      EXPECT_EQ(range[0], placements[s].base()[e]) << "where the sender puts them";
      EXPECT_EQ(static_cast<std::uint32_t>(range[1]), counts.experts[s][e]);
      mark(owners, static_cast<std::size_t>(range[0] - own.expert_offsets()[i]), counts.experts[s][e],
           static_cast<int>(s));
    }
    EXPECT_TRUE(std::is_sorted(owners.begin(), owners.end()));
    EXPECT_EQ(std::count(owners.begin(), owners.end(), -1), 0);
  }
}

TEST(Placement, RangesAreDisjointCompleteAndOrdered) {
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const PlacementRules rules = random_rules(random);
    const Counts counts = random_counts(random, rules);
    const std::vector<Placement> placements = place_all(rules, counts);
    for (std::uint32_t d = 0; d < rules.num_ranks; ++d) {
      SCOPED_TRACE(testing::Message() << "destination " << d);
      expect_sources(rules, counts, placements[d], d);
      if (rules.per_expert) {
        expect_per_expert(rules, counts, placements, d);
      } else {
        expect_compact(rules, counts, placements, d);
      }
      if (HasFailure()) return;
    }
  }
}

TEST(Placement, UnfilledRowsAreTheComplement) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    PlacementRules rules = random_rules(random);
    rules.expert_capacity = rules.expert_blocks ? 10000 : 0;
    rules.recv_rows =
        rules.expert_blocks ? rules.num_experts / rules.num_ranks * rules.expert_capacity : 150000;
    const Counts counts = random_counts(random, rules);
    const std::uint32_t d = between(random, 0, rules.num_ranks - 1);
    Placement placement;
    ASSERT_FALSE(place_rows(rules, counts.view(), d, placement).bad);
    std::vector<bool> filled(rules.recv_rows, false);
    if (!rules.per_expert) std::fill_n(filled.begin(), placement.num_recv_rows, true);
    for (std::size_t i = 0; i < placement.source_ranges().size(); i += 2) {
      std::fill_n(filled.begin() + placement.source_ranges()[i], placement.source_ranges()[i + 1], true);
    }
    for (const bool all : {false, true}) {
      // Below the last row that is reported as received, padding only, unless all are asked for.
      const std::uint64_t end = all                                        ? rules.recv_rows
                                : rules.per_expert && !rules.expert_blocks ? placement.num_recv_rows
                                                                           : 0;
      std::vector<bool> unfilled(rules.recv_rows, false);
      std::uint64_t last = 0;
      for (const RowRange& range : unfilled_rows(rules, placement, all)) {
        EXPECT_GT(range.count, 0u);
        EXPECT_GE(range.begin, last) << "not ascending";
        last = range.begin + std::uint64_t{range.count};
        ASSERT_LE(last, end);
        std::fill_n(unfilled.begin() + range.begin, range.count, true);
      }
      for (std::uint64_t i = 0; i < end; ++i)
        ASSERT_NE(filled[i], unfilled[i]) << "row " << i << " all " << all;
    }
  }
}

// Room that is just enough suffices; one row less is refused by every rank, in the same words.
TEST(Placement, EveryRankFindsTheSameOverflow) {
  std::uint32_t refused = 0;
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    PlacementRules rules = random_rules(random);
    const Counts counts = random_counts(random, rules);
    const std::uint32_t experts = rules.num_experts / rules.num_ranks;
    std::uint64_t most = 0;
    for (std::uint32_t e = 0; rules.expert_blocks && e < rules.num_experts; ++e)
      most = std::max(most, counts.to_expert(e));
    for (const Placement& placement : place_all(rules, counts)) {
      if (!rules.expert_blocks) most = std::max<std::uint64_t>(most, placement.num_recv_rows);
    }
    if (most == 0) continue;
    std::uint64_t& room = rules.expert_blocks ? rules.expert_capacity : rules.recv_rows;
    room = most;
    place_all(rules, counts);
    --room;
    Placement placement;
    const PlacementError first = place_rows(rules, counts.view(), 0, placement);
    ASSERT_TRUE(first.bad);
    EXPECT_EQ(first.rows, most);
    EXPECT_EQ(first.room, room);
    if (rules.expert_blocks) {
      ASSERT_GE(first.expert, 0);
      EXPECT_EQ(static_cast<std::uint32_t>(first.expert) / experts, first.rank);
      EXPECT_EQ(counts.to_expert(static_cast<std::uint32_t>(first.expert)), most);
    } else {
      EXPECT_EQ(first.expert, -1);
    }
    for (std::uint32_t r = 1; r < rules.num_ranks; ++r) {
      const PlacementError error = place_rows(rules, counts.view(), r, placement);
      ASSERT_TRUE(error.bad);
      EXPECT_EQ(error.rank, first.rank);
      EXPECT_EQ(error.expert, first.expert);
      EXPECT_EQ(error.rows, first.rows);
    }
    ++refused;
    if (HasFailure()) return;
  }
  EXPECT_GT(refused, 100u);
}

// Counts that no int32 holds must not wrap into something that fits.
TEST(Placement, SumsBeyond32BitsAreRefused) {
  PlacementRules rules;
  rules.num_ranks = rules.num_experts = 3;
  rules.recv_rows = 1000;
  const std::vector<std::uint32_t> huge = {0x80000000u, 0, 0};
  const std::vector<const std::uint32_t*> rows = {huge.data(), huge.data(), nullptr};
  Placement placement;
  for (const bool per_expert : {false, true}) {
    rules.per_expert = per_expert;
    const PlacementError error = place_rows(rules, {rows, rows}, 1, placement);
    EXPECT_TRUE(error.bad);
    EXPECT_EQ(error.rank, 0u);
    EXPECT_EQ(error.rows, std::uint64_t{1} << 32);
  }
}

TEST(Placement, WordsRestoreIt) {
  std::mt19937 random(5);
  const PlacementRules rules = random_rules(random);
  const Counts counts = random_counts(random, rules);
  Placement placement;
  ASSERT_FALSE(place_rows(rules, counts.view(), 0, placement).bad);
  Placement restored;
  restored.reset(rules.num_ranks, rules.num_experts, rules.per_expert);
  ASSERT_EQ(restored.words().size(), placement.words().size());
  std::copy(placement.words().begin(), placement.words().end(), restored.words().begin());
  EXPECT_TRUE(std::equal(placement.base().begin(), placement.base().end(), restored.base().begin()));
  EXPECT_TRUE(std::equal(placement.source_ranges().begin(), placement.source_ranges().end(),
                         restored.source_ranges().begin(), restored.source_ranges().end()));
}

}  // namespace
}  // namespace epd::kernels
