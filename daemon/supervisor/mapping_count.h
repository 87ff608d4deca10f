// Memory mappings that memberships cost engines, against what the kernel lets a process have.
//
// An engine maps of every rank of its groups two arenas and what its client has bound, and of its own ranks
// the board too. It can't do without one of them, so a rank for which one of the engines has no room is
// refused before any of them is told.
#pragma once

#include "common/status.h"
#include "device/name.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace epd::supervisor {

// What a process may have, and what of it memberships may use.
struct MappingLimit {
  std::uint64_t kernel = 65530;   // vm.max_map_count
  std::uint64_t reserve = 16384;  // for sessions, threads, code, drivers

  // Of this machine, for so many sessions.
  static MappingLimit of_kernel(std::uint32_t max_sessions);
  std::uint64_t allowed() const { return kernel - reserve; }
};

class MappingCount {
 public:
  void set_limit(const MappingLimit& limit) { limit_ = limit; }
  // RESOURCE_EXHAUSTED, with the numbers, if a process that must map the rank's memory has no room for it, or
  // the user, whose group it is, would have more than half of what there is.
  Status add(std::pair<std::uint64_t, std::uint32_t> member, std::uint32_t uid,
             const device::DeviceName& device, std::uint64_t client_memories);
  void remove(std::pair<std::uint64_t, std::uint32_t> member);
  // Of all users.
  std::uint64_t of_engine(const device::DeviceName& device) const;

 private:
  using Process = std::string;  // as messages name it
  struct Rank {
    Process engine;
    std::uint64_t mappings = 0;  // for each engine of the group
  };
  struct Group {
    std::uint32_t uid = 0;
    std::map<std::uint32_t, Rank> ranks;
    std::map<Process, std::uint64_t> engines;  // its ranks on each
    std::uint64_t mappings = 0;                // of all its ranks
  };
  struct Use {
    std::uint64_t all = 0;
    std::map<std::uint32_t, std::uint64_t> of_user;
  };
  Status check(const Process& process, std::uint32_t uid, std::uint64_t more) const;
  void take(const Process& process, std::uint32_t uid, std::uint64_t mappings);
  void give_back(const Process& process, std::uint32_t uid, std::uint64_t mappings);

  MappingLimit limit_;
  std::map<std::uint64_t, Group> groups_;
  std::map<Process, Use> used_;
};

}  // namespace epd::supervisor
