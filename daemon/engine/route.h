// The routings that one rank keeps: what combine, and dispatches that reuse one, need of a past dispatch.
#pragma once

#include "kernels/operations.h"
#include "proto/arena.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace epd {

// Whether abi::RoutingRecord::handle is that of dispatch `op_index`, however either is counted.
bool is_of(std::uint64_t handle, std::uint64_t op_index);

struct Route {
  std::uint64_t handle = 0;  // abi::RoutingRecord::handle
  std::uint64_t epoch = 0;   // of the group at that dispatch; 0 = before this rank's time
  kernels::RoutingPlan plan;
  kernels::Placement placement;
};

// One record per buffer slot and kept handle. An operation holds the route that it uses: a later dispatch on
// the same record makes a new one beside it. Saved routes lie in the exchange arena and outlive the engine.
class RouteTable {
 public:
  explicit RouteTable(const abi::GroupShape& shape);

  // An empty route for a dispatch, in place of the record's former one.
  std::shared_ptr<Route> renew(std::uint32_t record);
  // The route of dispatch `op_index`, from memory or, after a restart, from `arena`; null if stale.
  std::shared_ptr<Route> find(std::uint32_t record, std::uint64_t op_index, const std::byte* arena);
  // Selections that the dispatch saved in the record dropped; 0 if there is none.
  std::uint32_t saved_dropped(std::uint32_t record, const std::byte* arena) const;
  // Of a dispatch that this rank had no part in.
  std::shared_ptr<Route> empty(std::uint64_t op_index) const;
  // Makes `route` the record's, in memory and in `arena`.
  void keep(std::uint32_t record, std::shared_ptr<Route> route, std::byte* arena);

 private:
  std::shared_ptr<Route> restore(const std::byte* saved, std::uint64_t op_index) const;

  const abi::GroupShape shape_;
  const abi::ExchangeArenaLayout layout_;
  std::vector<std::shared_ptr<Route>> routes_;  // [num_routes()], null = never used
};

kernels::PlacementRules placement_rules(const abi::GroupShape& shape);
kernels::RowFormat row_format(const abi::GroupShape& shape);

}  // namespace epd
