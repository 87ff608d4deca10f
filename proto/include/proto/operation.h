// The request of an operation, and the rules for lawful ones. Plain data, also for device code.
#pragma once

#include "proto/shape.h"

#include <cstdint>

namespace epd::abi {

enum class Op : std::uint32_t { kNone = 0, kNoop = 1, kDispatch = 2, kCombine = 3 };

enum OpFlags : std::uint32_t {
  kFlagWeights = 1u << 0,        // dispatch: topk_weights travel; combine: rows are weighted
  kFlagCached = 1u << 1,         // dispatch: the record's routing is used again, topk_idx is not read
  kFlagZeroPadding = 1u << 2,    // dispatch, packed: the rows that align an expert's first row are zeroed
  kFlagMarkUnused = 1u << 3,     // dispatch: all rows that no token fills are marked, up to recv_rows()
  kFlagReturnWeights = 1u << 4,  // combine: y_weights come back as out_weights
  kFlagDefer = 1u << 5,          // say when the inputs have been read: Results::sent
  kBiasShift = 6,                // combine: two bits, the number of biases to add
  kFlagBiases = 3u << kBiasShift,
  // combine, with kFlagReturnWeights, compact: each of a token's K is summed over all ranks that got it
  kFlagSumWeights = 1u << 9,
  // calls of streams: its rows lie where CallWords::places says
  kFlagPlaces = 1u << 10,
  kFormatShift = 11,  // dispatch: two bits, the row format (GroupShape::format)
  kFlagFormat = 3u << kFormatShift,
  kDispatchFlags = kFlagWeights | kFlagCached | kFlagZeroPadding | kFlagMarkUnused | kFlagDefer |
                   kFlagPlaces | kFlagFormat,
  kCombineFlags =
      kFlagWeights | kFlagReturnWeights | kFlagSumWeights | kFlagDefer | kFlagBiases | kFlagPlaces,
};

constexpr std::uint32_t flags_of(Op op) {
  if (op == Op::kDispatch) return kDispatchFlags;
  return op == Op::kCombine ? std::uint32_t{kCombineFlags} : 0;
}
constexpr bool makes_routing(Op op, std::uint32_t flags) {
  return op == Op::kDispatch && (flags & kFlagCached) == 0;
}
// Which y_weights a combine returns as out_weights. As in epd.h.
enum ReturnWeights : std::uint32_t {
  kReturnNone = 0,
  kReturnOwn = 1,  // of the row that carried the choice
  kReturnSum = 2,  // compact: the sum over all ranks that got the token. Else the same as kReturnOwn
};
constexpr std::uint32_t return_flags(ReturnWeights weights) {
  return (weights != kReturnNone ? kFlagReturnWeights : 0u) | (weights == kReturnSum ? kFlagSumWeights : 0u);
}
constexpr std::uint32_t num_biases(std::uint32_t flags) {
  return (flags & kFlagBiases) >> kBiasShift;
}

constexpr std::uint32_t format_of(std::uint32_t flags) {
  return (flags & kFlagFormat) >> kFormatShift;
}
static_assert(kFlagFormat >> kFormatShift == kMaxFormats - 1);

// As far as operations of a group are judged by it.
struct OpLimits {
  std::uint32_t depth = 0;
  std::uint32_t max_tokens = 0;
  std::uint32_t num_routes = 0;
  std::uint32_t num_biases = 0;
  std::uint32_t num_formats = 1;
};
constexpr OpLimits op_limits(const GroupShape& s) {
  return {s.depth, s.max_tokens, s.num_routes(), s.num_biases, s.num_formats()};
}

// The parts of an operation that can be wrong whatever else is in flight.
struct OpRequest {
  Op op = Op::kNone;
  std::uint32_t slot = 0;
  std::uint32_t num_tokens = 0;
  std::uint32_t flags = 0;
  std::uint32_t route = 0;
};
enum class BadField : std::uint32_t { kNone, kOp, kSlot, kFlags, kBiases, kFormat, kTokens, kRoute };

// The first of them that is not lawful.
constexpr BadField bad_field(const OpRequest& request, const OpLimits& limits) {
  const bool routes = makes_routing(request.op, request.flags);
  if (request.op != Op::kNoop && request.op != Op::kDispatch && request.op != Op::kCombine)
    return BadField::kOp;
  if (request.slot >= limits.depth) return BadField::kSlot;
  if ((request.flags & ~flags_of(request.op)) != 0) return BadField::kFlags;
  if (num_biases(request.flags) > limits.num_biases) return BadField::kBiases;
  if (format_of(request.flags) >= limits.num_formats) return BadField::kFormat;
  if (request.num_tokens > (routes ? limits.max_tokens : 0)) return BadField::kTokens;
  if (request.route >= limits.num_routes) return BadField::kRoute;
  if (routes && request.route < limits.depth && request.route != request.slot) return BadField::kRoute;
  return BadField::kNone;
}

}  // namespace epd::abi
