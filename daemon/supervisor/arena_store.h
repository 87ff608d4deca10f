// The memory of group members: arenas and boards. The supervisor holds them so that they outlive engines.
#pragma once

#include "base/closer.h"
#include "base/quota.h"
#include "common/fd.h"
#include "common/memory.h"
#include "common/packet.h"
#include "device/memory.h"
#include "mapping_count.h"
#include "proto/link.h"
#include "proto/session.h"
#include "proto/shape.h"
#include "waits.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace epd::supervisor {

// Descriptors of memory of a client's own; null: there are none.
using ClientMemory = std::shared_ptr<const std::vector<UniqueFd>>;

// Whose memory is made, and for what group.
struct WantedMemory {
  abi::GroupShape shape{};
  std::uint64_t session = 0;
};

// Memory of a rank's client in which rows of its calls may lie: see MemoryMaps.
struct MappedByEngines {
  abi::MemoryRange range{};
  ClientMemory memory;                // of its pieces, or null
  std::set<std::uint32_t> awaited{};  // devices whose engines have not answered
  std::set<std::uint32_t> later{};    // those that are told when these have
  std::uint32_t member = 0;
  std::uint32_t request = 0;  // its client's, that waits for its reply; 0: none

  FdList fds() const {
    FdList all;
    if (memory == nullptr) return all;
    for (const UniqueFd& piece : *memory) all.push_back(piece.get());
    return all;
  }
};

struct MemberArenas {
  std::uint32_t uid = 0;
  device::DeviceName device;
  std::uint64_t bytes = 0;       // that count against limits: the two arenas, the board, and results
  std::uint64_t host_bytes = 0;  // those in host memory
  // Counted separately: the memory that the rank's engine may need for the rank's routings.
  std::uint64_t routing_bytes = 0;
  WantedMemory wanted;
  DescriptorShare descriptors;
  UniqueFd user;
  UniqueFd exchange;
  UniqueFd board;
  UniqueFd results;
  std::shared_ptr<const Mapping> board_map;         // also kept by readers of what is counted after the board
  bool given_up = false;                            // its client has said that it needs the contents no more
  std::map<std::uint32_t, MappedByEngines> mapped;  // by number
  abi::RowCounts rows{};                            // as its client tells

  // The first operation that its engine has not completed, from the board.
  std::uint64_t next_index() const;
  // The words in `user` at which the client's streams wait.
  abi::CloseStreams streams() const;
};

class ArenaStore {
 public:
  struct Limits {
    std::uint64_t max_bytes = 0;
    std::uint64_t max_routing_bytes = 0;
    MappingLimit mappings;
    std::uint64_t max_bytes_of_filler = ~std::uint64_t{0};  // see hold_to_memory
  };
  // The bytes that arenas of host devices have in memory: those of the user with the most, and of each of his
  // sessions, the largest first.
  struct Fullest {
    std::uint32_t uid = 0;
    std::uint64_t bytes = 0;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> sessions;  // bytes, session
  };
  // Closer and budget must outlive the store. The closer closes memory.
  ArenaStore(const Limits& limits, Closer& closer, DescriptorBudget& descriptors)
      : closer_(closer), descriptors_(descriptors) {
    set_limits(limits);
  }
  void set_limits(const Limits& limits) {
    limits_ = limits;
    mappings_.set_limit(limits.mappings);
    fillers_.clear();
  }

  // Makes the memory of (group, rank). RESOURCE_EXHAUSTED, with the numbers, if a limit is reached. max_bytes
  // limits host memory; a GPU's memory is limited by the GPU. The limit of mappings is that of the engines
  // that will map the memory. The board is ready to be read.
  Status acquire(std::pair<std::uint64_t, std::uint32_t> member, std::uint32_t uid, const UserQuotas& quotas,
                 const device::DeviceName& device, const WantedMemory& wanted);
  void release(std::uint64_t group_id, std::uint32_t rank);
  // When it is released, the arenas of a host device are emptied, since the client may keep its mapping. Of
  // all ranks of a session, or of one rank.
  void give_up(std::uint64_t session);
  void give_up(std::uint64_t group_id, std::uint32_t rank);
  // Nothing while none is touched, and while what was released is still being freed.
  std::optional<Fullest> fullest() const;
  // The user has filled the memory. Until set_limits() it is promised no more than max_bytes_of_filler.
  void hold_to_memory(std::uint32_t uid) { fillers_.insert(uid); }
  // nullptr if it was released.
  const MemberArenas* find(std::uint64_t group_id, std::uint32_t rank) const;
  MemberArenas* find(std::uint64_t group_id, std::uint32_t rank) {
    return const_cast<MemberArenas*>(std::as_const(*this).find(group_id, rank));
  }
  // The key is the group and the rank.
  const std::map<std::pair<std::uint64_t, std::uint32_t>, MemberArenas>& all() const { return arenas_; }

  // The waits for each rank by ranks that have left the group.
  std::vector<WaitSum> gone_waits(std::uint64_t group_id) const;

  std::uint64_t total_bytes() const { return total_bytes_; }
  std::uint64_t total_routing_bytes() const { return total_routing_bytes_; }
  // Only while no engine writes the board.
  void mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text, StatusCode cause,
                 std::int32_t failed_rank);

 private:
  Status check_quota(const MemberArenas& wanted, Quota of_user) const;
  Status check_routing_quota(const MemberArenas& wanted, const Quota& of_user) const;
  Status make(MemberArenas& made, const device::DeviceName& device) const;

  void keep_waits(std::uint64_t group_id, const MemberArenas& of);
  void drop_idle_user(std::uint32_t uid);

  struct User {
    std::uint64_t bytes = 0;
    std::uint64_t routing_bytes = 0;
  };

  Limits limits_;
  MappingCount mappings_;
  std::uint64_t total_routing_bytes_ = 0;
  Closer& closer_;
  DescriptorBudget& descriptors_;
  std::uint64_t total_bytes_ = 0;  // in host memory
  std::map<std::uint32_t, User> users_;
  std::set<std::uint32_t> fillers_;  // users
  std::map<std::pair<std::uint64_t, std::uint32_t>, MemberArenas> arenas_;
  std::map<std::uint64_t, std::vector<WaitSum>> gone_waits_;  // by group, of those that have ranks
};

}  // namespace epd::supervisor
