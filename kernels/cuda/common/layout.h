// What configure() and the kernels must agree on: how memory is divided. Compiled by both compilers.
#pragma once

#include "cuda/common/range.h"
#include "kernels/cuda_operation.h"
#include "kernels/host_device.h"

#include <cstdint>

namespace epd::kernels::cuda {

inline constexpr std::uint32_t kWorkspaceHead = 64;  // bytes; counts follow

// What combine knows of the rows in a stage.
struct StageHeader {
  std::uint32_t num_rows;
  std::uint32_t ends;  // bit p: row p is its rank's last, per-expert layouts
  float weight[32];
};

// Of a combine through landings: what a warp adds up at once, a piece of a row, and how many of them it has
// on their way.
inline constexpr std::uint32_t kSummedVectors = 4;  // of 16 bytes, of each lane
inline constexpr std::uint32_t kSummedAtOnce = kSummedVectors * 32;
inline constexpr std::uint32_t kSummedAhead = 7;
static_assert(abi::kLandingPieces * kSummedAtOnce * 8 >= abi::kMaxHidden);

// Of a dispatch through landings that casts: blocks of a row that a warp casts at once.
inline constexpr std::uint32_t kCastStepBlocks = 8;

EPD_HOST_DEVICE constexpr bool is_low_latency(const Operation& op) {
  return op.landing.max_tokens != 0 && op.shape.per_expert;
}

// Of a combine through landings: pieces of a sum.
EPD_HOST_DEVICE constexpr std::uint32_t num_pieces(std::uint32_t hidden) {
  return (hidden / 8 + kSummedAtOnce - 1) / kSummedAtOnce;
}

// How much the parts of an operation's shared memory have room for, for range checks. (HeaderLayout)
EPD_HOST_DEVICE constexpr std::uint32_t base_words(const Operation& op) {
  return (op.movers.header.ends - op.movers.header.base) / 4;
}
EPD_HOST_DEVICE constexpr std::uint32_t ends_words(const Operation& op) {
  return (op.movers.header.headers - op.movers.header.ends) / 4;
}
EPD_HOST_DEVICE constexpr std::uint32_t scratch_words(const Operation& op) {
  return (op.movers.header.bits - op.movers.header.scratch) / 4;
}
EPD_HOST_DEVICE constexpr std::uint32_t bits_words(const Operation& op) {
  return (op.movers.header_bytes - op.movers.header.bits) / 4;
}
// Of a stage of a combine that pulls: pieces of rows.
EPD_HOST_DEVICE constexpr std::uint32_t stage_pieces(const Operation& op) {
  return op.movers.stage_bytes / op.movers.chunk_bytes;
}
// And how many of cta_counts() the workspace has.
EPD_HOST_DEVICE constexpr std::uint32_t num_cta_counts(const Operation& op) {
  const auto words = static_cast<std::uint32_t>((op.workspace_bytes - kWorkspaceHead) / 4);
  return words - op.shape.num_ranks - op.shape.num_experts;
}

// Of a CTA's shared memory; each has a barrier. Through landings lanes load for themselves; the x that comes
// by bulk copies (OwnRows) has a barrier of its own.
EPD_HOST_DEVICE constexpr std::uint32_t num_barriers(const Operation& op) {
  return is_low_latency(op) ? 0 : op.movers.warps * op.movers.stages;
}

// How they are found.
struct HeaderLayout : HeaderParts {
  std::uint32_t bytes;

  static constexpr std::uint32_t kCounterBytes = 8192;  // more only if one warp's counters need it

  // `tokens`: Landing::max_tokens
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
    std::uint32_t landing = 0;  // words
    if (dispatch && tokens != 0) {
      landing = (shape.num_experts + 2 * shape.num_ranks) * ((tokens + 31) / 32);
      if (ctas == 1) landing += shape.num_experts * shape.num_ranks;  // counts; else they lie in stages
    }
    bytes = (bits + landing * 4 + 127) / 128 * 128;
  }
};

}  // namespace epd::kernels::cuda
