// Group: which routings stand, and who uses them.
#include "group.h"

#include <algorithm>

namespace epd::client {

Group::Group(Session& owner, const abi::GroupShape& agreed)
    : session(owner), shape(agreed), arena(agreed), routes(agreed.num_routes()) {
  free_routes.reserve(shape.num_handles);
  for (std::uint32_t route = shape.num_routes(); route-- > shape.depth;) free_routes.push_back(route);
}

// The engine has the last word; this finds what can be seen from here.
Status Group::find_route(epd_handle_t handle, std::uint32_t& route) const {
  const std::string name = "handle " + std::to_string(handle);
  if (handle == 0 || route_of(handle) >= routes.size() || op_of(handle) >= next_index)
    return not_found(name + " was never given in this group");
  route = static_cast<std::uint32_t>(route_of(handle));
  // Of a dispatch before this rank's time, in which it had no tokens.
  if (op_of(handle) < first_index) return {};
  const Route& found = routes[route];
  if (found.state == Route::State::kKnown && found.handle == handle) return {};
  if (found.state == Route::State::kUnsure) return {};
  if (route >= shape.depth) return not_found(name + " is not kept any more");
  return not_found(name + " is stale; allowed on slot " + std::to_string(route) + ": " +
                   (found.state == Route::State::kKnown
                        ? std::to_string(found.handle) + ", of its last dispatch"
                        : "none, it has had no dispatch"));
}

bool Group::route_busy(std::uint32_t route, bool writes) const {
  return std::any_of(slots.begin(), slots.end(), [&](const GroupSlot& slot) {
    return slot.ticket != 0 && slot.route == route && (writes || slot.writes_route);
  });
}

void Group::release_slot(GroupSlot& slot, bool ok) {
  if (!ok && slot.writes_route) {
    Route& route = routes[slot.route];
    // A resume may have given the record away before this was heard.
    if (route.state == Route::State::kKnown && route.ticket == slot.ticket) {
      const bool kept = slot.route >= shape.depth;
      route = {};
      if (kept) {
        free_routes.push_back(slot.route);
      } else {
        route.state = Route::State::kUnsure;
      }
    }
  }
  slot = {};
}

void Group::forget_routes_from(std::uint64_t op_index) {
  for (std::uint32_t i = 0; i < routes.size(); ++i) {
    if (routes[i].state != Route::State::kKnown || op_of(routes[i].handle) < op_index) continue;
    routes[i] = {};
    if (i < shape.depth) {
      routes[i].state = Route::State::kUnsure;
    } else {
      free_routes.push_back(i);
    }
  }
}

Status Group::release_handle(epd_handle_t handle) {
  const std::uint64_t route = route_of(handle);
  if (route < shape.depth || route >= routes.size() || routes[route].state != Route::State::kKnown ||
      routes[route].handle != handle) {
    return not_found("handle " + std::to_string(handle) + " is not a kept handle of this group");
  }
  if (route_busy(static_cast<std::uint32_t>(route), true))
    return would_block("an operation in flight uses handle " + std::to_string(handle));
  routes[route] = {};
  free_routes.push_back(static_cast<std::uint32_t>(route));
  return {};
}

}  // namespace epd::client
