// Where things lie in the user arena of a rank (the exchange arena: exchange.h). Computed here and nowhere
// else: the supervisor sizes the memory with it, engines and clients find their regions with it.
//
// A user arena has `depth` slots, each holding the regions below. The client maps its own; the engines
// of the node map all of a group's.
#pragma once

#include "proto/call_words.h"
#include "proto/exchange.h"
#include "proto/shape.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace epd::abi {

// M rows are delivered; C = GroupShape::choices_per_row(); rows = GroupShape::recv_rows().
enum class Region : std::uint32_t {
  kX = 0,            // in   [T,H] bf16 or e4m3, or [T,opaque_bytes]
  kXScales,          // in   [T,scale_bytes], if a format is kFp8
  kTopkIdx,          // in   [T,K] int32 or int64 (GroupShape::index_type); negative: no selection
  kTopkWeights,      // in   [T,K] float32
  kRecvX,            // out  [rows,row_bytes]
  kRecvScales,       // out  [rows,scale_bytes], or as GroupShape::scale_layout says; FP8 only
  kRecvTopkIdx,      // out  [rows,C] index type, local expert numbers, -1 elsewhere
  kRecvTopkWeights,  // out  [rows,C] float32, 0 elsewhere
  kRecvSrc,          // out  [rows,2] int32: rank, token; -1 in rows that no token fills
  kRankOffsets,      // out  [R+1] int32
  kExpertCounts,     // out  [E/R] int32
  kExpertOffsets,    // out  [E/R+1] int32, packed and expert
  kSourceRanges,     // out  [E/R,R] in GroupShape::range_format; packed and expert
  kY,                // in   [rows,H] bf16: expert output, the input of combine
  kYWeights,         // in   [rows,C] float32: gradients of recv_topk_weights, for combine
  kBias0,            // in   [T,H] bf16, if num_biases > 0
  kBias1,            // in   [T,H] bf16, if num_biases > 1
  kOut,              // out  [T,H] bf16: combined output
  kOutWeights,       // out  [T,K] float32: gradients of topk_weights
  kCount,
};
inline constexpr std::size_t kNumRegions = static_cast<std::size_t>(Region::kCount);

// As in epd.h.
inline constexpr std::array<const char*, kNumRegions> kRegionNames = {"x",
                                                                      "x_scales",
                                                                      "topk_idx",
                                                                      "topk_weights",
                                                                      "recv_x",
                                                                      "recv_scales",
                                                                      "recv_topk_idx",
                                                                      "recv_topk_weights",
                                                                      "recv_src",
                                                                      "rank_offsets",
                                                                      "expert_counts",
                                                                      "expert_offsets",
                                                                      "source_ranges",
                                                                      "y",
                                                                      "y_weights",
                                                                      "bias[0]",
                                                                      "bias[1]",
                                                                      "out",
                                                                      "out_weights"};

namespace detail {

// For a group with one row format.
constexpr std::uint64_t recv_scales_bytes(const GroupShape& s) {
  if (!s.scale_columns()) return s.recv_rows() * s.scale_bytes();
  return s.recv_rows() / s.scale_block_rows() * s.scale_pitch() * s.scale_bytes();
}

}  // namespace detail

// Rows of each format lie densely from the region's beginning, and the largest decides.
// If GroupShape is inside its limits, no product below exceeds 2^52, so nothing here can overflow: rows <=
// 2^31 and row bytes <= 2^16, R*T <= 2^26, depth <= 2^4.
constexpr std::uint64_t region_bytes(const GroupShape& s, Region region) {
  const std::uint64_t tokens = s.max_tokens;
  const std::uint64_t rows = s.recv_rows();
  const std::uint64_t experts = s.experts_per_rank();
  switch (region) {
    case Region::kX: return tokens * s.most_of_formats([](const GroupShape& f) { return f.x_bytes(); });
    case Region::kXScales:
      return tokens * s.most_of_formats([](const GroupShape& f) { return f.x_scales_bytes(); });
    case Region::kTopkIdx: return tokens * s.topk * s.index_bytes();
    case Region::kTopkWeights:
    case Region::kOutWeights: return tokens * s.topk * 4;
    case Region::kRecvX: return rows * s.most_of_formats([](const GroupShape& f) { return f.row_bytes(); });
    case Region::kRecvScales: return s.most_of_formats(detail::recv_scales_bytes);
    case Region::kRecvTopkIdx: return rows * s.choices_per_row() * s.index_bytes();
    case Region::kRecvTopkWeights:
    case Region::kYWeights: return rows * s.choices_per_row() * 4;
    case Region::kRecvSrc: return rows * 8;
    case Region::kRankOffsets: return (std::uint64_t{s.num_ranks} + 1) * 4;
    case Region::kExpertCounts: return experts * 4;
    case Region::kExpertOffsets: return s.per_expert() ? (experts + 1) * 4 : 0;
    case Region::kSourceRanges: return s.per_expert() ? experts * s.num_ranks * 8 : 0;
    case Region::kY: return rows * s.hidden * 2;
    case Region::kBias0: return s.num_biases > 0 ? tokens * s.hidden * 2 : 0;
    case Region::kBias1: return s.num_biases > 1 ? tokens * s.hidden * 2 : 0;
    case Region::kOut: return tokens * s.hidden * 2;
    case Region::kCount: break;
  }
  return 0;
}

// On a GPU: by these the blocks of one kernel of the client, which copies memory of its caller's, tell each
// other how far they are. 0 between kernels. Nobody else looks at them.
struct alignas(64) StagingWords {
  std::uint32_t taken;     // parts of the inputs that a block has taken
  std::uint32_t finished;  // of these, those that are copied, by blocks that found no more to take
  std::uint32_t begun;     // 1: the operation has begun
  std::uint32_t end;       // then: the number of its call + 1
  std::uint32_t left;      // blocks that have ended
};

constexpr std::uint32_t region_bit(Region region) {
  return 1u << static_cast<std::uint32_t>(region);
}
struct UserArenaLayout {
  // The region that lies where this one does; itself: none.
  static constexpr Region shared_with(const GroupShape& shape, Region region) {
    if (shape.shared_regions == 0) return region;
    switch (region) {
      case Region::kX: return Region::kOut;
      case Region::kOut: return Region::kX;
      case Region::kRecvX: return Region::kY;
      case Region::kY: return Region::kRecvX;
      default: return region;
    }
  }

  std::array<std::uint64_t, kNumRegions> offset{};  // within a slot
  std::uint64_t slot_bytes = 0;
  std::uint64_t staging = 0;  // StagingWords[depth]
  std::uint64_t calls = 0;    // CallWords
  std::uint64_t active = 0;   // int32[num_ranks], by the client alone: 1: the rank takes part
  std::uint64_t total_bytes = 0;

  constexpr explicit UserArenaLayout(const GroupShape& shape) {
    for (std::size_t i = 0; i < kNumRegions; ++i) {
      const auto region = static_cast<Region>(i);
      const Region other = shared_with(shape, region);
      const bool shares = other != region;
      offset[i] = shares && other < region ? offset[static_cast<std::size_t>(other)] : slot_bytes;
      if (shares && other < region) continue;
      const std::uint64_t bytes = region_bytes(shape, region);
      const std::uint64_t least = shares ? region_bytes(shape, other) : 0;
      slot_bytes += align_up(bytes > least ? bytes : least, kRegionAlign);
    }
    staging = slot_bytes * shape.depth;
    calls = staging + sizeof(StagingWords) * shape.depth;
    active = align_up(calls + sizeof(CallWords), 64);
    total_bytes = align_up(active + std::uint64_t{shape.num_ranks} * 4, kRegionAlign);
  }
  constexpr std::uint64_t staging_words(std::uint32_t slot) const {
    return staging + slot * sizeof(StagingWords);
  }
  constexpr std::uint64_t at(std::uint32_t slot, Region region) const {
    return slot_bytes * slot + offset[static_cast<std::size_t>(region)];
  }
};

}  // namespace epd::abi
