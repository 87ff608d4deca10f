// The memory of group members: arenas and boards, held here so that they outlive engines.
#pragma once

#include "base/memory.h"
#include "base/quota.h"
#include "device/memory.h"
#include "proto/session.h"
#include "proto/shape.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace epd {

struct MemberArenas {
  std::uint32_t uid = 0;
  std::uint64_t bytes = 0;       // of the two arenas and the board
  std::uint64_t host_bytes = 0;  // of them in host memory
  UniqueFd user;
  UniqueFd exchange;
  UniqueFd board;
  Mapping board_map;
};

class ArenaStore {
 public:
  explicit ArenaStore(std::uint64_t max_bytes) : max_bytes_(max_bytes) {}
  void set_max_bytes(std::uint64_t max_bytes) { max_bytes_ = max_bytes; }
  // Holds for the acquires of this user that follow, until it is set again.
  void set_user_quota(std::uint32_t uid, Quota quota) { users_[uid].quota = std::move(quota); }

  // For (group, rank). RESOURCE_EXHAUSTED, with the numbers, if a limit says no; max_bytes is of host memory,
  // a GPU's is limited by what it has. The board is ready to be read.
  Status acquire(std::pair<std::uint64_t, std::uint32_t> member, std::uint32_t uid, const DeviceName& device,
                 const abi::GroupShape& shape);
  void release(std::uint64_t group_id, std::uint32_t rank);
  // nullptr if released.
  const MemberArenas* find(std::uint64_t group_id, std::uint32_t rank) const;

  std::uint64_t total_bytes() const { return total_bytes_; }
  std::uint64_t next_index(std::uint64_t group_id, std::uint32_t rank) const;
  // Only while no engine writes the board.
  void mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text, StatusCode cause,
                 std::int32_t culprit_rank);

 private:
  Status check_quota(const MemberArenas& wanted) const;

  void drop_idle_user(std::uint32_t uid);

  struct User {
    std::uint64_t bytes = 0;
    Quota quota;
  };

  std::uint64_t max_bytes_;
  std::uint64_t total_bytes_ = 0;  // in host memory
  std::map<std::uint32_t, User> users_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, MemberArenas> arenas_;
};

}  // namespace epd
