// The time that ranks of groups have waited for each other (proto/waits.h), as messages. No loop here: memory
// is read while engines write it.
#pragma once

#include "common/memory.h"
#include "proto/shape.h"
#include "supervisor/control_facade.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace epd::v1 {
class GetWaitsResponse;
class ListOperationsResponse;
}  // namespace epd::v1

namespace epd::supervisor {

struct WaitSum {
  std::uint64_t ready_ns = 0;
  std::uint64_t arrived_ns = 0;
};

// Adds the waits that are counted after the board to `sums`, by the rank that was waited for.
void add_waits(std::vector<WaitSum>& sums, const Mapping& board, const abi::GroupShape& shape);

struct WaitingRank {
  std::uint32_t rank = 0;
  std::string device;
  std::shared_ptr<const Mapping> board;
};

struct WaitingGroup {
  std::uint64_t id = 0;
  std::string name;
  abi::GroupShape shape{};
  std::vector<WaitingRank> ranks;  // of this node, ascending
  std::vector<WaitSum> gone;       // of ranks that it has no more; may be empty
};

// In the order of `groups`.
v1::GetWaitsResponse message_of(const std::vector<WaitingGroup>& groups, const WaitsWanted& wanted);
// Waits of operations on host devices that have not ended. Engines of GPUs count theirs at each look.
void add_in_progress(v1::GetWaitsResponse& waits, const v1::ListOperationsResponse& operations,
                     const WaitsWanted& wanted);

}  // namespace epd::supervisor
