// The memory of group members: arenas and boards, held here so that they outlive engines.
#pragma once

#include "base/memory.h"
#include "proto/session.h"
#include "proto/shape.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace epd {

struct MemberArenas {
  std::uint32_t uid = 0;
  std::uint64_t bytes = 0;  // of the two arenas and the board
  UniqueFd user;
  UniqueFd exchange;
  UniqueFd board;
  Mapping board_map;
};

class ArenaStore {
 public:
  struct Limits {
    std::uint64_t total_bytes = 0;
    std::uint64_t bytes_per_user = 0;
  };
  explicit ArenaStore(const Limits& limits) : limits_(limits) {}
  void set_limits(const Limits& limits) { limits_ = limits; }

  // RESOURCE_EXHAUSTED, with the numbers, if a limit says no. The board is ready to be read.
  Status acquire(std::uint64_t group_id, std::uint32_t rank, std::uint32_t uid, const abi::GroupShape& shape);
  void release(std::uint64_t group_id, std::uint32_t rank);
  // nullptr if released.
  const MemberArenas* find(std::uint64_t group_id, std::uint32_t rank) const;

  std::uint64_t total_bytes() const { return total_bytes_; }
  std::uint64_t next_index(std::uint64_t group_id, std::uint32_t rank) const;
  // Only while no engine writes the board.
  void mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text, StatusCode cause,
                 std::int32_t culprit_rank);

 private:
  Status check_quota(std::uint32_t uid, std::uint64_t bytes) const;

  Limits limits_;
  std::uint64_t total_bytes_ = 0;
  std::map<std::uint32_t, std::uint64_t> user_bytes_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, MemberArenas> arenas_;
};

}  // namespace epd
