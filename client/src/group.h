// One rank's membership in a group, as the library keeps it.
#pragma once

#include "board.h"
#include "proto/attach.h"

#include <array>

namespace epd::client {

class Session;

inline constexpr std::uint64_t kNoDispatch = ~std::uint64_t{0};

struct GroupSlot {
  std::uint64_t ticket = 0;  // of the operation in flight; 0 = free
  // Of the slot's last dispatch. 0: it failed, so one before it may still stand; the engine decides.
  std::uint64_t handle = kNoDispatch;
};

struct Group {
  Group(Session& owner, const abi::GroupShape& agreed) : session(owner), shape(agreed), arena(agreed) {}

  void* region(std::uint32_t slot, abi::Region which) const { return user.as<char>(arena.at(slot, which)); }

  Session& session;
  const abi::GroupShape shape;
  const abi::UserArenaLayout arena;
  // Set by join, before anyone else sees the group.
  std::uint32_t member = 0;
  std::uint32_t rank = 0;
  std::uint32_t default_timeout_ms = 0;  // of operations that give none
  std::uint64_t first_index = 0;         // the operation with which this rank came; 0 unless it has rejoined
  Mapping user;
  BoardView board;
  // Guarded by the session's mutex.
  std::uint64_t epoch = 0;
  std::uint64_t next_index = 0;  // number of the next dispatch or combine; the engine counts alike
  std::array<GroupSlot, abi::kMaxDepth> slots{};
  bool left = false;  // leave has begun; hooks may still hold the handle
};

// The checked configuration as it goes to the daemon.
Status make_join(const epd_group_config_t& config, abi::Join& join);

}  // namespace epd::client
