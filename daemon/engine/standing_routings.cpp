#include "standing_routings.h"

#include <tuple>

namespace epd::engine {
namespace {

// Compares two dispatches on one record. Handles only grow within an epoch.
bool is_older(const abi::RoutingRecord& a, const abi::RoutingRecord& b) {
  return std::tie(a.epoch, a.handle) < std::tie(b.epoch, b.handle);
}

}  // namespace

// There may be thousands of heads, and a copy from a GPU takes some ten microseconds. So all are copied at
// once.
std::vector<StandingRouting> standing_routings(const abi::GroupShape& shape, device::Launcher& launcher,
                                               std::uint64_t next, std::byte* arena) {
  const abi::ExchangeArenaLayout layout(shape);
  std::vector<StandingRouting> all(shape.num_routes());
  std::vector<abi::RoutingRecord> heads(2 * all.size());
  launcher.read_rows(heads.data(), arena + layout.routing, sizeof(heads[0]), layout.half_bytes, heads.size());
  for (std::uint32_t i = 0; i < heads.size(); ++i) {
    const abi::RoutingRecord& head = heads[i];
    StandingRouting& last = all[i / 2];
    if (head.handle != 0 && abi::not_before(head.handle, next + 1)) {
      launcher.clear(arena + layout.routing_of(i / 2) + layout.half_bytes * (i % 2), sizeof(head));
    } else if (head.epoch != 0 && is_older(last.head, head)) {
      last = {head, i % 2};
    }
  }
  return all;
}

}  // namespace epd::engine
