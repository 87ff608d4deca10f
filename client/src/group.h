// One rank's membership in a group, as the library keeps it.
#pragma once

#include "bindings.h"
#include "board.h"
#include "calls.h"
#include "device.h"
#include "handle.h"
#include "proto/attach.h"

#include <array>
#include <mutex>
#include <vector>

namespace epd::client {

class Session;

// A handle is the number of its dispatch + 1, and the routing record that the engine keeps for it. Numbers
// have room for 89 years of 100,000 operations a second.
// Where operations are calls: as of the first dispatch, whichever has written the record.
inline constexpr std::uint32_t kHandleIndexBits = 48;
static_assert(abi::kMaxDepth + abi::kMaxHandles <= 1u << (64 - kHandleIndexBits));
constexpr epd_handle_t make_handle(std::uint64_t op_index, std::uint32_t route) {
  return (std::uint64_t{route} << kHandleIndexBits) | (op_index + 1);
}
constexpr std::uint64_t op_of(epd_handle_t handle) {
  return (handle & ((std::uint64_t{1} << kHandleIndexBits) - 1)) - 1;
}
constexpr std::uint64_t route_of(epd_handle_t handle) {
  return handle >> kHandleIndexBits;
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

// The stream in which an operation begins and ends, if in any.
struct StreamUse {
  void* stream = EPD_NO_STREAM;
  bool any() const { return stream != EPD_NO_STREAM; }
};

// Whether the stream alone sees to it that what was submitted first is first. NULL and CU_STREAM_LEGACY (1)
// are two names of one stream. CUDA's per-thread default stream (CU_STREAM_PER_THREAD, 2) is another one in
// each thread, so it says nothing.
inline bool in_one_stream(const StreamUse& first, const StreamUse& second) {
  const auto name = [](const StreamUse& use) {
    const auto stream = reinterpret_cast<std::uintptr_t>(use.stream);
    return stream == 1 ? 0 : stream;
  };
  return first.any() && second.any() && name(first) == name(second) && name(first) != 2;
}

// An operation in flight: submitted, its completion not seen yet.
struct InFlight {
  epd_ticket_t ticket = 0;
  std::uint32_t slot = 0;
  std::uint32_t route = kNoRoute;  // that it reads or writes
  bool writes_route = false;
  StreamUse stream;
};

// What the library knows of the StreamWords of a slot.
struct SlotWords {
  epd_ticket_t last = 0;    // the last that was to begin in a stream, 0 = none: what `ready` holds or will
  epd_ticket_t ended = 0;   // the last of those that have ended
  bool behind = false;      // one has failed: its engine may be unable to write `done`
  bool unblocking = false;  // the watch is about to write `ended` there
};

using AllSlotWords = std::array<SlotWords, abi::kMaxDepth>;

struct Group {
  Group(Session* owner, const abi::GroupShape& agreed, OwnMemory bound);
  ~Group() {
    if (given != nullptr) given->end();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Null if the group has no such region.
  void* region(std::uint32_t slot, abi::Region which) const {
    if (abi::region_bytes(shape, which) == 0) return nullptr;
    const auto index = static_cast<std::size_t>(which);
    if (own.at[index] != 0) return reinterpret_cast<void*>(own.at[index] + slot * own.bindings[index].stride);
    return reinterpret_cast<void*>(user_base() + arena.at(slot, which));
  }
  // Addresses of the host or of the device: nothing in the library looks at what is there.
  std::uintptr_t user_base() const {
    return device_user.address() != 0 ? device_user.address()
                                      : reinterpret_cast<std::uintptr_t>(user.as<char>());
  }

  // If operations are calls: abi::CallWords.
  std::uintptr_t call_words() const { return device_user.address() + arena.calls; }

  // routes.cpp; all with the session's mutex.
  // The record of a handle that may be used, or NOT_FOUND.
  Status find_route(epd_handle_t handle, std::uint32_t& route) const;
  // The first operation in flight on the slot that is in the way of one in this stream, or null.
  const InFlight* slot_busy(std::uint32_t slot, const StreamUse& next) const;
  bool stream_in_flight(std::uint32_t slot) const;
  // Whether one stands in the way of an operation that writes (or only reads) the record.
  bool route_busy(std::uint32_t route, bool writes, const StreamUse& next) const;
  // An operation has ended. They may end in any order.
  void end_in_flight(epd_ticket_t ticket, bool ok);
  // Dispatches from this one on have to be done again: they established nothing.
  void forget_routes_from(std::uint64_t op_index);
  Status release_handle(epd_handle_t handle);
  bool wants_unblock() const;  // of the streams of all slots, or of one's
  bool used_by_streams() const;
  // OK, or why nothing can be enqueued in the epoch.
  Status usable_in(std::uint64_t of_epoch) const;

  Session* const session;  // for the functions of the C ABI alone; null in tests of parts
  const abi::GroupShape shape;
  const OwnMemory own;  // its descriptors are the caller's, and perhaps closed
  const abi::UserArenaLayout arena;
  // Set by join, before anyone else sees the group.
  Handle<Group>* given = nullptr;  // what the caller holds
  std::uint32_t member = 0;
  std::uint32_t rank = 0;
  std::uint32_t sum_ranks = 0;           // as the daemon has chosen where the shape says 0
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
  std::uint64_t next_index = 0;            // number of the next dispatch or combine; the engine counts alike
  std::vector<InFlight> in_flight;         // in order of submission
  std::vector<Route> routes;               // [num_routes]
  std::vector<std::uint32_t> free_routes;  // of those beyond the slots'; the last is taken next
  AllSlotWords words{};
  Calls calls;
  // Whether the library itself is to unblock the streams that wait for this group's operations.
  // kDone is wanted again from time to time, until the streams have been synchronised.
  enum class Unblock { kNo, kWanted, kDone } unblock = Unblock::kNo;
  bool left = false;  // leave has begun; hooks may still hold the handle
};

// The checked shape, zeros replaced by the defaults.
Status read_shape(const epd_group_config_t& config, abi::GroupShape& shape);
// What such a group takes of memory; the caller's size stays out.
Status read_bytes(const epd_group_config_t& config, const epd_device_kind_t& kind, epd_group_bytes_t& bytes);
// The checked configuration, as it goes to the daemon, with `own`'s descriptors.
Status make_join(const epd_group_config_t& config, abi::Join& join, OwnMemory& own);

}  // namespace epd::client
