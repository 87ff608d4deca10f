// How configure() and the kernels divide memory. Both compilers read this file.
#pragma once

#include "cuda/common/range.h"
#include "kernels/host_device.h"
#include "kernels/operation.h"

#include <cstdint>

namespace epd::kernels::cuda {

inline constexpr std::uint32_t kWorkspaceHead = 64;  // bytes; the counts follow

// Combine keeps this about the rows in a stage.
struct StageHeader {
  std::uint32_t num_rows;
  std::uint32_t ends;  // per-expert layouts, bit p: row p is the last of its rank
  float weight[32];
};

// Low-latency combine: a warp adds up a piece of a row at a time. kSummedAtOnce is the size of a piece in
// vectors of 16 bytes; kSummedAhead is the number of pieces that a warp loads ahead.
inline constexpr std::uint32_t kSummedVectors = 4;  // of each lane
inline constexpr std::uint32_t kSummedAtOnce = kSummedVectors * 32;
inline constexpr std::uint32_t kSummedAhead = 7;
static_assert(abi::kInboxPieces * kSummedAtOnce * 8 >= abi::kMaxHidden);

// Low-latency dispatch with a cast: the number of blocks that a warp casts in one step.
inline constexpr std::uint32_t kCastStepBlocks = 8;

// Returns whether the operation takes the low-latency path.
EPD_HOST_DEVICE constexpr bool is_low_latency(const kernels::Operation& op) {
  return op.inbox.max_tokens != 0 && op.shape.per_expert;
}

// Low-latency combine: the number of pieces of a sum.
EPD_HOST_DEVICE constexpr std::uint32_t num_pieces(std::uint32_t hidden) {
  return (hidden / 8 + kSummedAtOnce - 1) / kSummedAtOnce;
}

// The sizes of the parts of a CTA's shared memory, in words. Only range checks use them (HeaderLayout).
EPD_HOST_DEVICE constexpr std::uint32_t base_words(const kernels::Operation& op) {
  return (op.division.header.ends - op.division.header.base) / 4;
}
EPD_HOST_DEVICE constexpr std::uint32_t ends_words(const kernels::Operation& op) {
  return (op.division.header.headers - op.division.header.ends) / 4;
}
EPD_HOST_DEVICE constexpr std::uint32_t scratch_words(const kernels::Operation& op) {
  return (op.division.header.bits - op.division.header.scratch) / 4;
}
EPD_HOST_DEVICE constexpr std::uint32_t bits_words(const kernels::Operation& op) {
  return (op.division.header_bytes - op.division.header.bits) / 4;
}
// High-throughput combine: the number of pieces of rows that fit in a stage.
EPD_HOST_DEVICE constexpr std::uint32_t stage_pieces(const kernels::Operation& op) {
  return op.division.stage_bytes / op.division.chunk_bytes;
}
// The number of words that the workspace has for cta_counts().
EPD_HOST_DEVICE constexpr std::uint32_t num_cta_counts(const kernels::Operation& op) {
  const auto words = static_cast<std::uint32_t>((op.workspace_bytes - kWorkspaceHead) / 4);
  return words - op.shape.num_ranks - op.shape.num_experts;
}

// The number of stages with a barrier each. The low-latency path needs none: there, each lane loads for
// itself. The bulk copies of x have a barrier of their own (OwnRows).
EPD_HOST_DEVICE constexpr std::uint32_t num_barriers(const kernels::Operation& op) {
  return is_low_latency(op) ? 0 : op.division.warps * op.division.stages;
}

// The offsets of the parts of a CTA's shared memory before the stages.
struct HeaderLayout : HeaderParts {
  std::uint32_t bytes;

  static constexpr std::uint32_t kCounterBytes = 8192;  // exceeded only if one warp's counters need more

  // `tokens` is Inbox::max_tokens.
  EPD_HOST_DEVICE constexpr HeaderLayout(Kind kind, const Shape& shape, std::uint32_t tokens,
                                         std::uint32_t num_stages, std::uint32_t ctas) {
    const bool dispatch = kind == Kind::kDispatch;
    barriers = 0;
    targets = barriers + num_stages * 8;
    base = targets + (dispatch ? shape.num_ranks * static_cast<std::uint32_t>(sizeof(DispatchTarget)) : 0);
    const std::uint32_t num_targets = shape.per_expert ? shape.num_experts : shape.num_ranks;
    ends = base + (dispatch ? num_targets * (shape.per_expert ? 1 : ctas) * 4 : 0);
    headers = ends + (dispatch ? shape.experts_per_rank * 8 : 0);
    scratch = headers + (dispatch ? 0 : num_stages * static_cast<std::uint32_t>(sizeof(StageHeader)));
    const std::uint32_t wanted = kCounterBytes / 4 / num_targets;
    counting_warps = wanted < 1 ? 1 : wanted > kMaxThreads / 32 ? kMaxThreads / 32 : wanted;
    const std::uint32_t words = shape.num_ranks + shape.num_experts + counting_warps * num_targets;
    bits = scratch + (dispatch ? words * 4 : 0);
    std::uint32_t inbox_words = 0;
    if (dispatch && tokens != 0) {
      inbox_words = (shape.num_experts + 2 * shape.num_ranks) * ((tokens + 31) / 32);
      // The counts. If there are more CTAs, the counts are in CTA 0's stages.
      if (ctas == 1) inbox_words += shape.num_experts * shape.num_ranks;
    }
    bytes = (bits + inbox_words * 4 + 127) / 128 * 128;
  }
};

}  // namespace epd::kernels::cuda
