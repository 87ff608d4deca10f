// One rank's membership in a group, as the library keeps it.
#pragma once

#include "board.h"
#include "device.h"
#include "proto/attach.h"

#include <array>
#include <mutex>
#include <vector>

namespace epd::client {

class Session;

// A handle is the number of its dispatch + 1, and the routing record that the engine keeps for it.
constexpr epd_handle_t make_handle(std::uint64_t op_index, std::uint32_t route) {
  return (std::uint64_t{route} << abi::kTagIndexBits) | (op_index + 1);
}
constexpr std::uint64_t op_of(epd_handle_t handle) {
  return (handle & ((std::uint64_t{1} << abi::kTagIndexBits) - 1)) - 1;
}
constexpr std::uint64_t route_of(epd_handle_t handle) {
  return handle >> abi::kTagIndexBits;
}

// A routing record. Those of the slots come first, the others are kept: in use or in Group::free_routes.
struct Route {
  enum class State {
    kNone,
    kKnown,
    kUnsure,  // of a slot, whose dispatch failed: what was there before may still stand; the engine decides
  };
  State state = State::kNone;
  epd_handle_t handle = 0;       // kKnown
  epd_ticket_t ticket = 0;       // kKnown: of the dispatch
  std::uint32_t num_tokens = 0;  // kKnown: of the dispatch
};

inline constexpr std::uint32_t kNoRoute = ~0u;

struct GroupSlot {
  epd_ticket_t ticket = 0;         // of the operation in flight; 0 = free
  std::uint32_t route = kNoRoute;  // that it reads or writes
  bool writes_route = false;
};

struct Group {
  Group(Session& owner, const abi::GroupShape& agreed);

  // Null if the group has no such region.
  void* region(std::uint32_t slot, abi::Region which) const {
    if (abi::region_bytes(shape, which) == 0) return nullptr;
    return reinterpret_cast<void*>(user_base() + arena.at(slot, which));
  }
  // Addresses of the host or of the device: nothing in the library looks at what is there.
  std::uintptr_t user_base() const {
    return device_user.address() != 0 ? device_user.address()
                                      : reinterpret_cast<std::uintptr_t>(user.as<char>());
  }

  // routes.cpp; all with the session's mutex.
  // The record of a handle that may be used, or NOT_FOUND.
  Status find_route(epd_handle_t handle, std::uint32_t& route) const;
  // Whether an operation in flight stands in the way of one that writes (or only reads) the record.
  bool route_busy(std::uint32_t route, bool writes) const;
  // The operation in flight on the slot has ended.
  void release_slot(GroupSlot& slot, bool ok);
  // Dispatches from this one on have to be done again: they established nothing.
  void forget_routes_from(std::uint64_t op_index);
  Status release_handle(epd_handle_t handle);

  Session& session;
  const abi::GroupShape shape;
  const abi::UserArenaLayout arena;
  // Set by join, before anyone else sees the group.
  std::uint32_t member = 0;
  std::uint32_t rank = 0;
  std::uint32_t default_timeout_ms = 0;  // of operations that give none
  std::uint64_t first_index = 0;         // the operation with which this rank came; 0 unless it has rejoined
  Mapping user;                          // on host devices, else
  DeviceMemory device_user;              // this
  BoardView board;
  // Held by a submission from its checks until it is in the ring: keeps the order of the group's operations
  // while the session's mutex is let go for a driver call.
  std::mutex submit_mutex;
  // Guarded by the session's mutex.
  std::uint64_t epoch = 0;
  std::uint64_t next_index = 0;  // number of the next dispatch or combine; the engine counts alike
  std::array<GroupSlot, abi::kMaxDepth> slots{};
  std::vector<Route> routes;               // [num_routes]
  std::vector<std::uint32_t> free_routes;  // of those beyond the slots'; the last is taken next
  // Of each slot's last operation on a stream, 0 = none: what its StreamWords hold, or will.
  std::array<epd_ticket_t, abi::kMaxDepth> stream_tickets{};
  // Whether the library itself is to release the streams that wait for this group's operations.
  enum class Release { kNo, kWanted, kDone } release = Release::kNo;
  bool left = false;  // leave has begun; hooks may still hold the handle
};

// The checked configuration, zeros replaced by the defaults, as it goes to the daemon.
Status make_join(const epd_group_config_t& config, abi::Join& join);

}  // namespace epd::client
