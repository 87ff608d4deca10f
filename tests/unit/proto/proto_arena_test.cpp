// Layouts of shared memory: everything aligned, disjoint and inside, at random shapes and at the limits.
#include "proto/arena.h"
#include "proto/mapped_memory.h"
#include "proto/session.h"

#include <gtest/gtest.h>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace epd::abi {
namespace {

using Wide = unsigned __int128;

GroupShape shape_of(std::uint32_t ranks, std::uint32_t experts, std::uint32_t tokens, std::uint32_t hidden,
                    std::uint32_t topk, std::uint32_t depth) {
  return {
      ranks, experts, tokens, hidden, topk, depth, Payload::kBf16, IndexType::kInt32, LossPolicy::kFailFast};
}

std::vector<GroupShape> many_shapes() {
  std::vector<GroupShape> shapes = {
      shape_of(1, 1, 1, 128, 1, 1),
      shape_of(kMaxRanks, kMaxExperts, kMaxTokens, kMaxHidden, kMaxTopk, kMaxDepth),
      shape_of(kMaxRanks, kMaxRanks, 1, 128, 1, 1),
      shape_of(1, kMaxExperts, kMaxTokens, kMaxHidden, kMaxTopk, kMaxDepth),
      shape_of(7, 7 * 3, 13, 384, 5, 3),
  };
  std::mt19937 random(7);
  const auto pick = [&](std::uint32_t low, std::uint32_t high) { return low + random() % (high - low + 1); };
  for (int i = 0; i < 200; ++i) {
    const std::uint32_t ranks = pick(1, kMaxRanks);
    shapes.push_back(shape_of(ranks, ranks * pick(1, kMaxExperts / ranks), pick(1, kMaxTokens),
                              pick(1, kMaxHidden / 8) * 8, pick(1, kMaxTopk), pick(1, kMaxDepth)));
  }
  const std::size_t plain = shapes.size();
  for (std::size_t i = 0; i < plain; ++i) {
    GroupShape other = shapes[i];
    other.payload = static_cast<Payload>(pick(1, 3));
    other.index_type = IndexType::kInt64;
    other.layout = static_cast<Layout>(pick(0, 2));
    if (other.is_fp8()) other.scale_format = pick(0, 1) == 0 ? ScaleFormat::kFloat32 : ScaleFormat::kUe8m0;
    if (other.payload == Payload::kOpaque) other.opaque_bytes = 16 * pick(1, kMaxOpaqueBytes / 16);
    other.expert_alignment = pick(1, kMaxAlignment);
    other.num_biases = pick(0, kMaxBiases);
    other.num_handles = pick(0, 64);
    if (pick(0, 2) == 0) other.max_recv_rows = pick(1, 1000);
    other.num_more_formats = other.payload == Payload::kOpaque ? 0 : pick(0, kMaxMoreFormats);
    for (std::uint32_t f = 0; f < other.num_more_formats; ++f) {
      other.more_formats[f].payload = static_cast<Payload>(pick(0, 2));
      const bool fp8 = other.more_formats[f].payload != Payload::kBf16;
      if (fp8 && pick(0, 1) == 0) other.more_formats[f].scale_format = ScaleFormat::kUe8m0;
    }
    if (other.has_scales()) other.scale_layout = static_cast<ScaleLayout>(pick(0, 1));
    if (other.per_expert()) other.range_format = static_cast<RangeFormat>(pick(0, 1));
    shapes.push_back(other);
  }
  return shapes;
}

Wide wide_recv_rows(const GroupShape& s) {
  const Wide most = Wide{s.num_ranks} * s.max_tokens;
  const Wide experts = s.num_experts / s.num_ranks;
  const Wide room = s.max_recv_rows;
  if (s.layout == Layout::kExpert) return experts * (room != 0 ? room : most);
  if (room != 0) return room;
  if (s.layout == Layout::kCompact) return most;
  return most * (s.topk < experts ? Wide{s.topk} : experts) + experts * (s.expert_alignment - 1);
}

// For a group with one row format.
Wide wide_format_bytes(const GroupShape& s, Region region) {
  const Wide tokens = s.max_tokens, rows = wide_recv_rows(s), hidden = s.hidden, topk = s.topk;
  const Wide experts = s.num_experts / s.num_ranks;
  const Wide index = s.index_type == IndexType::kInt64 ? 8 : 4;
  const bool compact = s.layout == Layout::kCompact;
  const Wide choices = compact ? topk : 1;
  const bool fp8 = s.payload == Payload::kFp8Cast || s.payload == Payload::kFp8;
  const Wide row = s.payload == Payload::kBf16 ? hidden * 2 : fp8 ? hidden : Wide{s.opaque_bytes};
  const Wide blocks = (hidden + 127) / 128;
  const Wide scales = !fp8 ? 0 : s.scale_format == ScaleFormat::kUe8m0 ? (blocks + 3) / 4 * 4 : blocks * 4;
  switch (region) {
    case Region::kX: return tokens * (s.payload == Payload::kFp8Cast ? hidden * 2 : row);
    case Region::kXScales: return s.payload == Payload::kFp8 ? tokens * scales : 0;
    case Region::kTopkIdx: return tokens * topk * index;
    case Region::kTopkWeights:
    case Region::kOutWeights: return tokens * topk * 4;
    case Region::kRecvX: return rows * row;
    case Region::kRecvScales: {
      if (s.scale_layout == ScaleLayout::kRowMajor) return rows * scales;
      const Wide matrices = s.layout == Layout::kExpert ? experts : 1;
      return matrices * (scales / 4) * ((rows / matrices + 3) / 4 * 16);
    }
    case Region::kRecvTopkIdx: return rows * choices * index;
    case Region::kRecvTopkWeights:
    case Region::kYWeights: return rows * choices * 4;
    case Region::kRecvSrc: return rows * 8;
    case Region::kRankOffsets: return (Wide{s.num_ranks} + 1) * 4;
    case Region::kExpertCounts: return experts * 4;
    case Region::kExpertOffsets: return compact ? 0 : (experts + 1) * 4;
    case Region::kSourceRanges: return compact ? 0 : experts * s.num_ranks * 8;
    case Region::kY: return rows * hidden * 2;
    case Region::kBias0: return s.num_biases >= 1 ? tokens * hidden * 2 : 0;
    case Region::kBias1: return s.num_biases >= 2 ? tokens * hidden * 2 : 0;
    case Region::kOut: return tokens * hidden * 2;
    case Region::kCount: break;
  }
  return 0;
}

Wide wide_region_bytes(const GroupShape& s, Region region) {
  Wide most = wide_format_bytes(s, region);
  for (const RowFormat& more : std::span(s.more_formats).first(s.num_more_formats)) {
    GroupShape other = s;
    other.payload = more.payload;
    other.scale_format = more.scale_format;
    most = std::max(most, wide_format_bytes(other, region));
  }
  return most;
}

TEST(UserArena, RegionsAreAlignedDisjointAndInside) {
  for (const GroupShape& s : many_shapes()) {
    const UserArenaLayout layout(s);
    Wide end = 0;  // of everything so far; regions and slots lie in order
    for (std::uint32_t slot = 0; slot < s.depth; ++slot) {
      for (std::size_t i = 0; i < kNumRegions; ++i) {
        const auto region = static_cast<Region>(i);
        const Wide at = layout.at(slot, region);
        ASSERT_EQ(region_bytes(s, region), wide_region_bytes(s, region)) << "region " << i;
        ASSERT_EQ(at % kRegionAlign, Wide{0});
        ASSERT_GE(at, end) << "region " << i << " of slot " << slot << " overlaps the one before";
        ASSERT_LT(at - end, Wide{kRegionAlign}) << "a hole before region " << i;
        end = at + wide_region_bytes(s, region);
      }
    }
    // After the last slot: words by which copying blocks of a slot agree, no two slots in one cache line.
    for (std::uint32_t slot = 0; slot < s.depth; ++slot) {
      const std::uint64_t words = layout.staging_words(slot);
      ASSERT_EQ(words % 64, 0u);
      ASSERT_GE(Wide{words}, end) << "the words of slot " << slot << " overlap what is before";
      ASSERT_LT(words - end, Wide{kRegionAlign});
      end = Wide{words} + sizeof(StagingWords);
    }
    ASSERT_EQ(layout.calls % 64, 0u);
    ASSERT_GE(Wide{layout.calls}, end);
    ASSERT_LT(layout.calls - end, Wide{kRegionAlign});
    end = Wide{layout.calls} + sizeof(CallWords);
    ASSERT_EQ(layout.active % 64, 0u);
    ASSERT_GE(Wide{layout.active}, end);
    ASSERT_LT(layout.active - end, Wide{64});
    end = Wide{layout.active} + Wide{s.num_ranks} * 4;
    ASSERT_LE(end, Wide{layout.total_bytes});
    ASSERT_LT(layout.total_bytes - end, Wide{kRegionAlign});
    ASSERT_LT(Wide{layout.total_bytes}, Wide{1} << 52) << "the header's own promise";
  }
}

TEST(UserArena, RegionsThatShareHaveRoomForTheLarger) {
  for (GroupShape s : many_shapes()) {
    const UserArenaLayout apart(s);
    s.shared_regions = 1;
    const UserArenaLayout shared(s);
    const auto room = [&s](Region region) { return align_up(region_bytes(s, region), kRegionAlign); };
    Wide saved = 0;
    for (const auto& [one, other] :
         {std::pair(Region::kX, Region::kOut), std::pair(Region::kRecvX, Region::kY)}) {
      ASSERT_EQ(shared.at(0, one), shared.at(0, other));
      saved += std::min(room(one), room(other));
    }
    ASSERT_EQ(Wide{apart.slot_bytes} - shared.slot_bytes, saved);
    // The other regions are there too, in the order of the regions.
    const auto room_at = [&](Region region) {
      const Region other = UserArenaLayout::shared_with(s, region);
      return std::max(room(region), room(other));
    };
    for (std::size_t i = 0; i < kNumRegions; ++i) {
      const auto region = static_cast<Region>(i);
      ASSERT_LE(shared.at(0, region) + room_at(region), shared.slot_bytes);
    }
  }
}

TEST(MemoryRange, WhatCannotBeIsNamed) {
  const auto said = [](MemoryRange range, std::size_t fds) {
    const std::string wrong = check_memory_range(range, fds);
    return wrong.substr(wrong.find(": ") == std::string::npos ? 0 : wrong.find(": ") + 2);
  };
  const auto range = [](MemoryBy by, std::uint64_t offset, std::uint64_t bytes, std::uint64_t whole) {
    MemoryRange made;
    made.number = kMaxMapped - 1;
    made.generation = 1;
    made.by = by;
    made.offset = offset;
    made.bytes = bytes;
    made.whole = whole;
    return made;
  };
  EXPECT_EQ(said(range(MemoryBy::kDescriptor, 16, 5, 21), 1), "");
  EXPECT_EQ(said(range(MemoryBy::kIpcHandle, 0, 21, 21), 0), "");
  EXPECT_EQ(said(range(MemoryBy::kNothing, 0, 0, 0), 0), "");
  EXPECT_EQ(said(range(MemoryBy::kDescriptor, 16, 5, 21), 0), "descriptors is 0; allowed: 1");
  EXPECT_EQ(said(range(MemoryBy::kIpcHandle, 16, 5, 21), 1), "descriptors is 1; allowed: 0");
  EXPECT_EQ(said(range(static_cast<MemoryBy>(3), 0, 1, 1), 0), "by is 3; allowed: 0 .. 2");
  EXPECT_EQ(said(range(MemoryBy::kIpcHandle, 8, 5, 21), 0), "offset is 8; allowed: multiples of 16 below 21");
  EXPECT_EQ(said(range(MemoryBy::kIpcHandle, 32, 5, 21), 0),
            "offset is 32; allowed: multiples of 16 below 21");
  EXPECT_EQ(said(range(MemoryBy::kIpcHandle, 16, 6, 21), 0), "bytes is 6; allowed: 1 .. 5");
  EXPECT_EQ(said(range(MemoryBy::kIpcHandle, 0, 0, 21), 0), "bytes is 0; allowed: 1 .. 21");
  EXPECT_EQ(said(range(MemoryBy::kIpcHandle, 0, 1, kMaxMappedBytes + 1), 0).find("whole is"), 0u);
  MemoryRange wrong = range(MemoryBy::kIpcHandle, 0, 1, 1);
  wrong.number = kMaxMapped;
  EXPECT_EQ(said(wrong, 0), "number is 64; allowed: 0 .. 63");
  wrong = range(MemoryBy::kIpcHandle, 0, 1, 1);
  wrong.generation = 0;
  EXPECT_EQ(said(wrong, 0), "generation is 0; allowed: 1 .. 65535");
  wrong.generation = 1;
  wrong.pieces = 2;
  EXPECT_EQ(said(wrong, 0), "pieces is 2; allowed: 1 .. 1");
  wrong = range(MemoryBy::kDescriptor, 0, 1, 64);
  wrong.pieces = 0;
  EXPECT_EQ(said(wrong, 0), "pieces is 0; allowed: 1 .. 20");
  wrong.pieces = 21;
  EXPECT_EQ(said(wrong, 21), "pieces is 21; allowed: 1 .. 20");
  wrong.pieces = 4;
  EXPECT_EQ(said(wrong, 3), "descriptors is 3; allowed: 4");
  wrong.whole = 66;
  EXPECT_EQ(said(wrong, 4), "whole is 66; allowed: multiples of its 4 pieces");
  wrong.whole = 64;
  EXPECT_EQ(said(wrong, 4), "");
}

TEST(RowPlace, KeepsItsThreeParts) {
  for (const std::uint32_t number : {0u, 1u, kMaxMapped - 1}) {
    for (const std::uint32_t generation : {1u, 2u, kMaxMemoryGeneration}) {
      for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{16}, kMaxPlaceOffset}) {
        const RowPlace place = row_place(number, generation, offset);
        EXPECT_NE(place, 0u);
        EXPECT_EQ(memory_of_place(place), number);
        EXPECT_EQ(generation_of_place(place), generation);
        EXPECT_EQ(place & kMaxPlaceOffset, offset);
      }
    }
  }
  EXPECT_GE(memory_of_place(0), kMaxMapped);
}

TEST(ExchangeArena, BlocksAndRoutingAreAlignedDisjointAndInside) {
  for (const GroupShape& s : many_shapes()) {
    const ExchangeArenaLayout layout(s);
    const Wide ranks = s.num_ranks;
    const Wide ready_end = Wide{layout.ready} + ranks * 64;
    const Wide arrived_end = Wide{layout.arrived} + ranks * 64;
    const Wide announced_end = Wide{layout.announcement} + ranks * sizeof(OpAnnouncement);
    const Wide rank_counts_end = Wide{layout.rank_counts} + ranks * ranks * 4;
    const Wide expert_counts_end = Wide{layout.expert_counts} + ranks * s.num_experts * 4;
    ASSERT_LE(ready_end, Wide{layout.arrived});
    ASSERT_LE(arrived_end, Wide{layout.announcement});
    ASSERT_LE(announced_end, Wide{layout.rank_counts});
    ASSERT_LE(rank_counts_end, Wide{layout.expert_counts});
    ASSERT_LE(expert_counts_end, Wide{layout.block_bytes});
    for (const std::uint64_t at :
         {layout.ready, layout.arrived, layout.rank_counts, layout.expert_counts, layout.topk})
      ASSERT_EQ(at % 64, 0u);
    ASSERT_EQ(layout.announcement % alignof(OpAnnouncement), 0u);
    ASSERT_EQ(layout.block_bytes % kRegionAlign, 0u);
    ASSERT_EQ(layout.routing_bytes % kRegionAlign, 0u);

    ASSERT_GE(layout.placement, sizeof(RoutingRecord));
    ASSERT_LE(Wide{layout.placement} + Wide{placement_words(s)} * 4, Wide{layout.topk});
    ASSERT_LE(Wide{layout.topk} + Wide{s.max_tokens} * s.topk * 4, Wide{layout.routing_bytes});
    ASSERT_GE(Wide{layout.routing}, Wide{layout.block_bytes} * s.depth)
        << "routing records overlap the blocks";
    ASSERT_GE(Wide{layout.inboxes}, Wide{layout.routing} + Wide{layout.routing_bytes} * s.num_routes())
        << "inboxes overlap routing records";
    ASSERT_EQ(Wide{layout.generation}, Wide{layout.inboxes} + Wide{layout.inbox_bytes} * s.depth);
    ASSERT_EQ(Wide{layout.total_bytes}, Wide{layout.generation} + 64);
    ASSERT_LE(Wide{layout.routing_of(s.num_routes() - 1)} + layout.routing_bytes, Wide{layout.total_bytes});
  }
}

GroupShape decoding(std::uint32_t tokens, std::uint32_t ranks = 4) {
  GroupShape s = shape_of(ranks, 256, tokens, 7168, 8, 4);
  s.layout = Layout::kExpert;
  return s;
}

TEST(Inbox, PartsAreAlignedDisjointAndInside) {
  for (const Payload payload : {Payload::kBf16, Payload::kFp8Cast, Payload::kOpaque}) {
    for (const std::uint32_t tokens : {1u, 13u, 128u, 512u}) {
      GroupShape s = decoding(tokens);
      s.payload = payload;
      s.topk = 7;
      if (payload == Payload::kOpaque) s.opaque_bytes = 16 * 1001;
      const InboxLayout inbox(s);
      const std::uint64_t slots = std::uint64_t{s.num_ranks} * tokens;
      ASSERT_NE(inbox.bytes, 0u) << tokens;
      EXPECT_LE(inbox.begin_messages + std::uint64_t{s.num_ranks} * 64, inbox.tags);
      EXPECT_LE(inbox.tags + slots * kInboxPieces * 8, inbox.plans);
      const std::uint64_t words = 1 + (tokens + 63) / 64 + 256 / 4;  // 64 experts on each of 4 ranks
      EXPECT_LE(inbox.plans + s.num_ranks * words * 16, inbox.requested);
      EXPECT_LE(inbox.requested + slots * 7 * 16, inbox.slots);
      EXPECT_LE(inbox.slots + slots * inbox.slot_bytes, inbox.bytes);
      EXPECT_GE(inbox.slot_bytes, s.row_bytes() + s.scale_bytes() + 7 * 8)
          << "a row, its scales, its weights and choices";
      EXPECT_GE(inbox.slot_bytes, s.hidden * 2) << "a partial sum";
      EXPECT_EQ(inbox.tags % 8, 0u);
      EXPECT_EQ(inbox.plans % 64, 0u);
      EXPECT_EQ(inbox.requested % 64, 0u);
      EXPECT_EQ(inbox.slots % 128, 0u);
      EXPECT_EQ(inbox.slot_bytes % 16, 0u);
    }
  }
}

TEST(Inbox, SlotsHaveRoomForRowsOfEachFormat) {
  GroupShape s = decoding(128);
  s.payload = Payload::kFp8Cast;
  const std::uint64_t alone = InboxLayout(s).slot_bytes;
  s.num_more_formats = 1;
  EXPECT_GT(InboxLayout(s).slot_bytes, alone) << "bf16, with weights and choices";
  GroupShape swapped = s.with_format(1);
  swapped.num_more_formats = 1;
  swapped.more_formats[0] = s.format(0);
  EXPECT_EQ(InboxLayout(swapped).slot_bytes, InboxLayout(s).slot_bytes);
}

TEST(Inbox, OnlyFewTokensHaveOne) {
  EXPECT_NE(InboxLayout(decoding(512)).bytes, 0u);
  EXPECT_EQ(InboxLayout(decoding(513)).bytes, 0u);
  EXPECT_EQ(InboxLayout(decoding(1, 64)).bytes, 0u) << "more ranks than one node has";
  GroupShape s = decoding(128);
  s.layout = Layout::kCompact;
  EXPECT_EQ(InboxLayout(s).bytes, 0u) << "one row for each (token, rank) anyway";
  s = decoding(128);
  s.topk = 1;
  EXPECT_EQ(InboxLayout(s).bytes, 0u) << "likewise";
  s = decoding(512, 32);
  EXPECT_NE(InboxLayout(s).bytes, 0u);
  s.num_experts = 512;
  EXPECT_EQ(InboxLayout(s).bytes, 0u) << "16384 counts of rows";
  s.num_ranks = 4;
  EXPECT_NE(InboxLayout(s).bytes, 0u);
  s.num_experts = 1024;
  EXPECT_EQ(InboxLayout(s).bytes, 0u) << "half a million bits of choices";
  s.max_tokens = 256;
  EXPECT_NE(InboxLayout(s).bytes, 0u);
  s.max_tokens = 16;
  s.num_experts = 4096;
  s.num_ranks = 2;
  EXPECT_EQ(InboxLayout(s).bytes, 0u) << "too many experts";
  s = decoding(512, 16);
  s.payload = Payload::kOpaque;
  s.opaque_bytes = kMaxOpaqueBytes;
  EXPECT_EQ(InboxLayout(s).bytes, 0u) << "half a gigabyte of slots";
}

TEST(ExchangeArena, OperationsInFlightHaveBlocksOfTheirOwn) {
  const GroupShape s = shape_of(3, 6, 16, 128, 2, 4);
  const ExchangeArenaLayout layout(s);
  for (std::uint64_t op = 0; op < 12; ++op) {
    for (std::uint64_t other = op + 1; other < op + s.depth; ++other) {
      const std::uint64_t a = layout.block(op, s.depth);
      const std::uint64_t b = layout.block(other, s.depth);
      EXPECT_GE(a > b ? a - b : b - a, layout.block_bytes) << op << " and " << other;
    }
    EXPECT_LE(layout.block(op, s.depth) + layout.block_bytes, layout.routing);
    EXPECT_EQ(layout.inbox(op, s.depth), layout.inboxes + layout.inbox_bytes * (op % s.depth));
  }
}

TEST(GroupShapeTest, DerivedValuesAtTheLimits) {
  GroupShape s = shape_of(kMaxRanks, kMaxExperts, kMaxTokens, kMaxHidden, kMaxTopk, kMaxDepth);
  EXPECT_EQ(s.recv_rows(), std::uint64_t{1} << 26);
  EXPECT_EQ(s.experts_per_rank(), 4u);
  EXPECT_EQ(s.row_bytes(), 32768u);
  EXPECT_EQ(s.scale_bytes(), 0u);
  s.layout = Layout::kPacked;
  EXPECT_EQ(s.recv_rows(), std::uint64_t{1} << 28);
  s.layout = Layout::kExpert;
  EXPECT_EQ(s.recv_rows(), std::uint64_t{1} << 28);
  s.payload = Payload::kFp8Cast;
  s.index_type = IndexType::kInt64;
  EXPECT_EQ(s.row_bytes(), 16384u);
  EXPECT_EQ(s.scale_bytes(), 512u);
  s.scale_format = ScaleFormat::kUe8m0;
  EXPECT_EQ(s.scale_bytes(), 128u);
  EXPECT_EQ(s.index_bytes(), 8u);
}

}  // namespace
}  // namespace epd::abi
