// One rank's membership in a group, as the library keeps it.
#pragma once

#include "active_mask.h"
#include "board.h"
#include "calls.h"
#include "device.h"
#include "handle.h"
#include "mapped_memory.h"
#include "proto/attach.h"
#include "step.h"

#include <array>
#include <mutex>
#include <string>
#include <vector>

namespace epd::client {

class Session;
struct SubmitRequest;

// A handle is the number of a routing record, and Group::comebacks + 1.
inline constexpr std::uint32_t kHandleIndexBits = 48;
static_assert(abi::kMaxDepth + abi::kMaxHandles <= 1u << (64 - kHandleIndexBits));
constexpr epd_handle_t make_handle(std::uint32_t comebacks, std::uint32_t route) {
  return (std::uint64_t{route} << kHandleIndexBits) | (std::uint64_t{comebacks} + 1);
}
constexpr std::uint64_t comebacks_of(epd_handle_t handle) {
  return (handle & ((std::uint64_t{1} << kHandleIndexBits) - 1)) - 1;
}
constexpr std::uint64_t route_of(epd_handle_t handle) {
  return handle >> kHandleIndexBits;
}

inline constexpr std::uint32_t kNoRoute = ~0u;

// A routing record. The first `depth` belong to the slots. The others are kept by handles, or in
// Group::free_routes.
struct Route {
  epd_handle_t handle = 0;  // 0: it has had no dispatch, or is free
  epd_ticket_t ticket = 0;  // of its dispatch, as the next
  std::uint32_t num_tokens = 0;
  bool tokens_known = false;  // num_tokens is n
};

// The routing whose counts are in a slot's regions, as operations were submitted.
struct SlotCounts {
  std::uint32_t route = kNoRoute;
  epd_ticket_t made = 0;  // Route::ticket
  epd_ticket_t by = 0;    // the dispatch that delivers them
};

// The outputs of a slot's last operation that go to the caller's memory. Host devices.
struct Outputs {
  epd_ticket_t ticket = 0;  // 0: nothing
  stream_kernels::Copies copies;
};

// The stream of an operation, if it has one.
struct StreamUse {
  void* stream = EPD_NO_STREAM;
  bool any() const { return stream != EPD_NO_STREAM; }
};

// The event of a slot, if the session has events: it completes with the operation of the ticket.
struct SlotEvent {
  DeviceEvent event;
  epd_ticket_t ticket = 0;  // 0: none yet. Guarded by the session's mutex
};

struct Group {
  Group(Session* owner, const abi::GroupShape& agreed);
  ~Group() {
    if (given != nullptr) given->end();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Null if the group has no such region.
  void* region(std::uint32_t slot, abi::Region which) const {
    if (abi::region_bytes(shape, which) == 0) return nullptr;
    return reinterpret_cast<void*>(user_base() + arena.at(slot, which));
  }
  // Addresses of host or device memory. The library itself uses only the words of calls there.
  std::uintptr_t user_base() const {
    return device_user.address() != 0 ? device_user.address()
                                      : reinterpret_cast<std::uintptr_t>(user.as<char>());
  }

  abi::StagingWords* staging_words(std::uint32_t slot) const {
    return reinterpret_cast<abi::StagingWords*>(user_base() + arena.staging_words(slot));
  }
  // The address of abi::CallWords.
  std::uintptr_t call_words() const { return user_base() + arena.calls; }

  // In routes.cpp. With the session's mutex.
  Status find_earlier(const SubmitRequest& combine, std::uint32_t& route) const;
  // Under the handle of a dispatch from before this rank joined it takes part without tokens.
  Status check_early(const SubmitRequest& operation) const;
  // A dispatch with this ticket was submitted.
  void note_counts(std::uint32_t slot, std::uint32_t route, epd_ticket_t ticket) {
    counted[slot] = {route, routes[route].ticket, ticket};
  }
  void forget_counts() {
    counted = {};
    for (Route& route : routes) route.tokens_known = false;
  }
  // A slot whose regions have the counts of the record; the depth: there is none. If it can, the one given.
  std::uint32_t slot_with_counts(std::uint32_t route, std::uint32_t rather) const;
  Status release_handle(epd_handle_t handle);
  bool wants_unblock() const { return unblock == Unblock::kWanted; }
  // OK, or the reason why nothing can be submitted in the epoch.
  Status usable_in(std::uint64_t of_epoch) const;

  Session* const session;  // for the C functions only; null in tests of parts
  const abi::GroupShape shape;
  const abi::UserArenaLayout arena;
  // Set by join, before any other thread sees the group.
  Handle<Group>* given = nullptr;  // the handle that the caller has
  std::string group_name;
  abi::Join request{};  // with which it was joined
  std::uint64_t id = 0;
  std::uint32_t member = 0;
  std::uint32_t rank = 0;
  std::uint32_t sum_ranks = 0;           // the shape's, or the daemon's choice
  std::uint32_t default_timeout_ms = 0;  // of operations that give no timeout
  bool shares_device = false;            // another rank of the group is on this rank's device
  std::uint64_t first_index = 0;         // the first operation of this rank; 0 unless it has rejoined
  std::uint32_t comebacks = 0;           // how often it was late before: handles of then have ended
  Mapping user;                          // on host devices
  DeviceMemory device_user;              // on CUDA devices
  BoardView board;
  ActiveMask active_mask;
  GroupMapped mapped;  // guarded by the session's mutex
  // A submission holds it from its checks until it is in the ring. It keeps the group's operations in order
  // while the session's mutex is released for a driver call.
  std::mutex submit_mutex;
  std::vector<Outputs> outputs;   // [depth]; guarded by submit_mutex
  std::vector<SlotEvent> events;  // [depth], or empty
  // Held from a wait in a stream until the event behind it is recorded and has its ticket.
  std::mutex events_mutex;
  // Guarded by the session's mutex.
  std::uint64_t epoch = 0;
  std::uint64_t next_index = 0;            // the first operation of the epoch that has no end known here
  std::vector<Route> routes;               // [num_routes]
  std::vector<std::uint32_t> free_routes;  // free records for kept handles; the last is taken first
  std::array<SlotCounts, abi::kMaxDepth> counted{};
  Calls calls;
  // Whether the library must unblock the streams that wait for this group's operations. kDone becomes kWanted
  // again from time to time, until the streams have been synchronised.
  enum class Unblock { kNo, kWanted, kDone } unblock = Unblock::kNo;
  bool left = false;  // leave has begun; hooks may still use the group
};

// Checks the shape, and replaces zeros by the defaults.
Status read_shape(const epd_group_config_t& config, abi::GroupShape& shape);
// INVALID_ARGUMENT: not a region's number.
Status read_region(const epd_region_t& given, std::uint32_t& region);
// The memory of such a group. Does not set `size`.
Status read_bytes(const epd_group_config_t& config, const epd_device_kind_t& kind, epd_group_bytes_t& bytes);
// Checks the configuration and makes the daemon's message from it.
Status make_join(const epd_group_config_t& config, abi::Join& join);

}  // namespace epd::client
