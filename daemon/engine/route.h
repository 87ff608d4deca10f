// The routings that one rank keeps: what combine, and dispatches that reuse one, need of a past dispatch.
#pragma once

#include "kernels/operations.h"
#include "proto/arena.h"
#include "proto/route_memory.h"

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
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

// The routings of one rank: one record per buffer slot and kept handle. All lie in the exchange arena, and
// outlive the engine; the last kept_routes() that were used lie in memory too, as plans. An operation holds
// the route that it uses: a later dispatch on the same record makes a new one beside it.
//
// At most kept_routes() + depth routes exist, since no more than `depth` operations of a rank hold one. What
// is large is done in pieces, for the engine's loop.
class RouteTable {
 public:
  explicit RouteTable(const abi::GroupShape& shape);

  // A route to be planned anew, whose memory may be that of one that nobody needs; in place of the record's
  // in memory.
  std::shared_ptr<Route> renew(std::uint32_t record);
  // The route of dispatch `op_index`, if it is in memory.
  std::shared_ptr<Route> find(std::uint32_t record, std::uint64_t op_index);
  // Selections that the dispatch saved in the record dropped; 0 if there is none.
  std::uint32_t saved_dropped(std::uint32_t record, const std::byte* arena) const;
  // Of a dispatch that this rank had no part in.
  std::shared_ptr<Route> empty(std::uint64_t op_index);
  // An operation needs it no more.
  void give_back(std::shared_ptr<Route> route);
  // All that are not held elsewhere, for somebody else to free.
  std::vector<std::shared_ptr<Route>> take_all();

  // Of what a record in the arena holds: the choices of dispatch `op_index`, or null if it is not that.
  // Choices become a plan; then restore() gives `route` the rest. False: they have been overwritten since.
  std::optional<kernels::RoutingInput> saved(std::uint32_t record, std::uint64_t op_index,
                                             const std::byte* arena) const;
  bool restore(std::uint32_t record, std::uint64_t op_index, const std::byte* arena,
               const std::shared_ptr<Route>& route);

  // Makes `route` the record's: begin, then choices until `done` is all of them, then end.
  void begin_keep(std::uint32_t record, const Route& route, std::byte* arena) const;
  bool keep_choices(std::uint32_t record, const Route& route, std::byte* arena, std::size_t& done) const;
  void end_keep(std::uint32_t record, std::shared_ptr<Route> route, std::byte* arena);

 private:
  struct Kept {
    std::uint32_t record;
    std::shared_ptr<Route> route;
  };
  std::shared_ptr<Route> unused();
  void remember(std::uint32_t record, std::shared_ptr<Route> route);
  void forget(std::list<Kept>::iterator kept);

  const abi::GroupShape shape_;
  const abi::ExchangeArenaLayout layout_;
  std::list<Kept> kept_;  // in memory; used last: first
  std::unordered_map<std::uint32_t, std::list<Kept>::iterator> by_record_;
  std::vector<std::shared_ptr<Route>> spare_;  // nobody's
};

kernels::PlacementRules placement_rules(const abi::GroupShape& shape);
kernels::RowFormat row_format(const abi::GroupShape& shape);

}  // namespace epd
