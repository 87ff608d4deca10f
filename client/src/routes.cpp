// Group: which routings exist, and which operations use them.
#include "group.h"

#include "operations.h"

#include <algorithm>

namespace epd::client {
namespace {

// Submissions in the ring, operations of an engine, and completions not taken. So push_back never allocates.
constexpr std::size_t kMostInFlight = 2 * abi::kSubmissionSlots + abi::kCompletionSlots;

}  // namespace

Group::Group(Session* owner, const abi::GroupShape& agreed, OwnMemory bound)
    : session(owner),
      shape(agreed),
      own(std::move(bound)),
      arena(agreed, abi::bound_regions(own.bindings)),
      registered(own.registered),
      outputs(agreed.depth),
      routes(agreed.num_routes()) {
  free_routes.reserve(shape.num_handles);
  in_flight.reserve(kMostInFlight);
  for (std::uint32_t route = shape.num_routes(); route-- > shape.depth;) free_routes.push_back(route);
}

// The engine decides. This finds what the library can know.
Status Group::find_route(const SubmitRequest& operation, std::uint32_t& route) const {
  const epd_handle_t handle = operation.handle;
  const std::string name = "handle " + std::to_string(handle);
  if (handle == 0 && first_index != 0) return find_earlier(operation, route);
  if (handle == 0 || route_of(handle) >= routes.size() || op_of(handle) >= next_index)
    return not_found(name + " was never given in this group, or its dispatch has failed");
  route = static_cast<std::uint32_t>(route_of(handle));
  if (op_of(handle) < first_index) return check_early(operation);
  const Route& found = routes[route];
  if (found.state == Route::State::kKnown && found.handle == handle) return {};
  if (found.state == Route::State::kUnsure) return {};
  if (route >= shape.depth) return not_found(name + " is not kept any more");
  return not_found(name + " is stale; allowed on slot " + std::to_string(route) + ": " +
                   (found.state == Route::State::kKnown
                        ? std::to_string(found.handle) + ", of its last dispatch"
                        : "none, it has had no dispatch"));
}

// A record that holds no routing of this rank: the engine takes it for one of before the rank joined.
Status Group::find_earlier(const SubmitRequest& combine, std::uint32_t& route) const {
  const auto known = [&](std::uint32_t record) { return routes[record].state == Route::State::kKnown; };
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

const InFlight* Group::slot_busy(std::uint32_t slot) const {
  const auto found =
      std::find_if(in_flight.begin(), in_flight.end(), [&](const InFlight& op) { return op.slot == slot; });
  return found != in_flight.end() ? &*found : nullptr;
}

Status Group::usable_in(std::uint64_t of_epoch) const {
  if (left) return {StatusCode::kAborted, "this rank has left the group"};
  return board.usable_in(of_epoch);
}

bool Group::route_busy(std::uint32_t route, bool writes) const {
  return std::any_of(in_flight.begin(), in_flight.end(),
                     [&](const InFlight& op) { return op.route == route && (writes || op.writes_route); });
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

void Group::end_in_flight(epd_ticket_t ticket, bool ok) {
  const auto found = std::find_if(in_flight.begin(), in_flight.end(),
                                  [&](const InFlight& op) { return op.ticket == ticket; });
  if (found == in_flight.end()) return;
  const InFlight op = *found;
  in_flight.erase(found);
  if (!ok && counted[op.slot].by == ticket) counted[op.slot] = {};
  if (ok || !op.writes_route) return;
  Route& route = routes[op.route];
  // A later dispatch may own the record: one after a resume that came first.
  if (route.state != Route::State::kKnown || route.ticket != ticket) return;
  route = {};
  if (op.route >= shape.depth) {
    free_routes.push_back(op.route);
  } else {
    route.state = Route::State::kUnsure;
  }
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
  const auto record = static_cast<std::uint32_t>(route);
  if (route_busy(record, true) || calls.uses(record))
    return would_block("an operation in flight uses handle " + std::to_string(handle));
  routes[route] = {};
  free_routes.push_back(record);
  return {};
}

}  // namespace epd::client
