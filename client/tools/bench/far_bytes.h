// What must cross between nodes in an operation: computed from routing and protocol, not from what was sent.
#pragma once

#include "plan.h"

#include <cstdint>
#include <span>

namespace epd::bench {

// Of one rank as a source of dispatch and as an owner of tokens in combine.
struct FarBytes {
  std::uint64_t pairs = 0;  // (token, other node) with an expert of the token's there
  std::uint64_t rows = 0;   // dispatch: one record for each pair
  std::uint64_t sums = 0;   // combine: one for each (token, domain) or, where several nodes share a domain,
                            // for each (token, rank)
  std::uint64_t asks = 0;   // combine: what it asks other nodes for
  std::uint64_t announcements = 0;  // to other nodes, of one operation
};

// topk_idx: [tokens, topk], -1: none.
FarBytes far_bytes(const RunPlan& plan, std::uint32_t rank, std::span<const std::int32_t> topk_idx);

}  // namespace epd::bench
