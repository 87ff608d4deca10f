// The memory of group members: arenas and boards, held here so that they outlive engines.
#pragma once

#include "base/closer.h"
#include "base/descriptors.h"
#include "base/quota.h"
#include "common/fd.h"
#include "common/memory.h"
#include "device/memory.h"
#include "mapping_count.h"
#include "proto/link.h"
#include "proto/session.h"
#include "proto/shape.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace epd::supervisor {

// Descriptors of memory that a client keeps regions in; null: of none.
using ClientMemory = std::shared_ptr<const std::vector<UniqueFd>>;

// What a rank keeps its regions in: arenas of ours, but for those that it has bound to memory of its own.
struct WantedMemory {
  abi::GroupShape shape{};
  abi::Bindings bindings{};
  ClientMemory memory;
  bool results = false;  // its operations are calls

  std::size_t num_memories() const { return memory == nullptr ? 0 : memory->size(); }
};

struct MemberArenas {
  std::uint32_t uid = 0;
  device::DeviceName device;
  // Counted: the two arenas, the board, and results. On a host device also what is bound: engines may be the
  // first to touch a page of it, and a page is charged to who touches it first.
  std::uint64_t bytes = 0;
  std::uint64_t host_bytes = 0;  // of them in host memory
  // Counted by itself: what its engine may have in its own memory of the rank's routings.
  std::uint64_t routing_bytes = 0;
  WantedMemory wanted;
  DescriptorShare descriptors;
  UniqueFd user;
  UniqueFd exchange;
  UniqueFd board;
  UniqueFd results;  // if it has any
  Mapping board_map;

  // Of the board: the first operation that its engine has not completed.
  std::uint64_t next_index() const;
  // Where in `user` a client's streams wait.
  abi::CloseStreams streams() const;
};

class ArenaStore {
 public:
  // Descriptors that the members of one user may have us keep of memory of their own.
  static constexpr std::uint64_t kMaxClientMemoriesPerUser = 4096;

  struct Limits {
    std::uint64_t max_bytes = 0;
    std::uint64_t max_routing_bytes = 0;
    MappingLimit mappings;
  };
  // Both outlive the store. The closer closes memory.
  ArenaStore(const Limits& limits, Closer& closer, DescriptorBudget& descriptors)
      : closer_(closer), descriptors_(descriptors) {
    set_limits(limits);
  }
  void set_limits(const Limits& limits) {
    limits_ = limits;
    mappings_.set_limit(limits.mappings);
  }

  // For (group, rank). RESOURCE_EXHAUSTED, with the numbers, if a limit says no; max_bytes is of host memory,
  // a GPU's is limited by what it has; mappings are those of the engines that will map it. INVALID_ARGUMENT
  // if memory of the client's can't be used, as far as that can be told without using it. The board is ready
  // to be read.
  Status acquire(std::pair<std::uint64_t, std::uint32_t> member, std::uint32_t uid, const UserQuotas& quotas,
                 const device::DeviceName& device, const WantedMemory& wanted);
  void release(std::uint64_t group_id, std::uint32_t rank);
  // nullptr if released.
  const MemberArenas* find(std::uint64_t group_id, std::uint32_t rank) const;
  // By group and rank.
  const std::map<std::pair<std::uint64_t, std::uint32_t>, MemberArenas>& all() const { return arenas_; }

  std::uint64_t total_bytes() const { return total_bytes_; }
  // Only while no engine writes the board.
  void mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text, StatusCode cause,
                 std::int32_t failed_rank);

 private:
  Status check_quota(const MemberArenas& wanted, const Quota& of_user) const;
  Status check_routing_quota(const MemberArenas& wanted, const Quota& of_user) const;
  Status make(MemberArenas& made, const device::DeviceName& device) const;

  void drop_idle_user(std::uint32_t uid);

  struct User {
    std::uint64_t bytes = 0;
    std::uint64_t client_memories = 0;
    std::uint64_t routing_bytes = 0;
  };

  Limits limits_;
  MappingCount mappings_;
  std::uint64_t total_routing_bytes_ = 0;
  Closer& closer_;
  DescriptorBudget& descriptors_;
  std::uint64_t total_bytes_ = 0;  // in host memory
  std::map<std::uint32_t, User> users_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, MemberArenas> arenas_;
};

}  // namespace epd::supervisor
