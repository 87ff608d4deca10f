// Group: which routings exist, and which operations use them.
#include "group.h"

#include "operations.h"

#include <algorithm>

namespace epd::client {
Group::Group(Session* owner, const abi::GroupShape& agreed)
    : session(owner), shape(agreed), arena(agreed), outputs(agreed.depth), routes(agreed.num_routes()) {
  free_routes.reserve(shape.num_handles);
  for (std::uint32_t route = shape.num_routes(); route-- > shape.depth;) free_routes.push_back(route);
}

// A record that holds no routing of this rank: the engine takes it for one of before the rank joined.
Status Group::find_earlier(const SubmitRequest& combine, std::uint32_t& route) const {
  const auto known = [&](std::uint32_t record) { return routes[record].handle != 0; };
  if (combine.num_tokens != 0)
    return bad_value("num_tokens", combine.num_tokens,
                     "0 with handle 0: no token of this rank was dispatched");
  route = combine.slot;
  for (std::uint32_t record = 0; known(route) && record < routes.size(); ++record) route = record;
  if (!known(route)) return {};
  return not_found(
      "handle 0 names a dispatch of before this rank joined, and every record has had a later one");
}

Status Group::check_early(const SubmitRequest& operation) const {
  const std::string name = "handle " + std::to_string(operation.handle);
  if (comebacks != 0)
    return not_found(name + " is of before epd_group_restore took back this rank: it has ended");
  if (operation.num_tokens == 0) return {};
  return bad_value("num_tokens", operation.num_tokens,
                   "0, as " + name + " is of a dispatch before this rank joined");
}

Status Group::usable_in(std::uint64_t of_epoch) const {
  if (left) return {StatusCode::kAborted, "this rank has left the group"};
  return board.usable_in(of_epoch);
}

std::uint32_t Group::slot_with_counts(std::uint32_t route, std::uint32_t rather) const {
  const auto has = [&](std::uint32_t slot) {
    const SlotCounts& counts = counted[slot];
    return counts.route == route && counts.made != 0 && counts.made == routes[route].ticket;
  };
  std::uint32_t slot = rather;
  if (!has(slot)) {
    for (slot = 0; slot < shape.depth && !has(slot);) ++slot;
  }
  return slot;
}

Status Group::release_handle(epd_handle_t handle) {
  const std::uint64_t route = route_of(handle);
  if (handle == 0 || route < shape.depth || route >= routes.size() || routes[route].handle != handle) {
    return not_found("handle " + std::to_string(handle) + " is not a kept handle of this group");
  }
  const auto record = static_cast<std::uint32_t>(route);
  if (calls.uses(record)) return would_block("an operation in flight uses handle " + std::to_string(handle));
  routes[route] = {};
  free_routes.push_back(record);
  return {};
}

}  // namespace epd::client
