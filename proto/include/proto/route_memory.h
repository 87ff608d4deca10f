// The memory in which the engine of a host device keeps the routings of one rank: the daemon counts it when
// the rank joins, and the engine keeps to it.
#pragma once

#include "proto/arena.h"
#include "proto/shape.h"

#include <algorithm>
#include <cstdint>

namespace epd::abi {

// One routing as a plan (kernels::RoutingPlan, Placement), in the worst case.
constexpr std::uint64_t route_bytes(const GroupShape& s) {
  constexpr std::uint64_t kSmallParts = 1024;
  const std::uint64_t tokens = s.max_tokens;
  const std::uint64_t rows = s.per_expert() ? s.topk : std::min(s.topk, s.num_ranks);  // of a token
  const std::uint64_t counts = 2 * std::uint64_t{s.num_ranks} + s.num_experts + placement_words(s);
  return (tokens + 1 + tokens * s.topk + counts) * 4 + tokens * rows * 8 + kSmallParts;
}

// Routings of a rank that stay in memory, once no operation uses them: as many as fit in here, and at least
// one for each slot. Others are read back from the exchange arena when they are used.
inline constexpr std::uint64_t kKeptRouteBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kept_routes(const GroupShape& s) {
  return std::clamp<std::uint64_t>(kKeptRouteBytes / route_bytes(s), s.depth, s.num_routes());
}

// All that a rank may have in memory: those, and one for each operation that may hold one; and of every
// record what is known of its two halves.
constexpr std::uint64_t routing_bytes(const GroupShape& s) {
  constexpr std::uint64_t kRecordBytes = 96;
  return (kept_routes(s) + s.depth) * route_bytes(s) + s.num_routes() * kRecordBytes;
}

}  // namespace epd::abi
