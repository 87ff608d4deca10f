// Counts the memory mappings that memberships cost engines, and compares them with the kernel's limit for a
// process.
//
// For every rank of its groups an engine maps two arenas. For its own ranks it maps the board and the results
// too. It needs all of them. So a rank for which one of the engines has no room is refused before any engine
// is told.
#pragma once

#include "common/status.h"
#include "device/name.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace epd::supervisor {

// The mappings that a process may have, and how many of them memberships may use.
struct MappingLimit {
  std::uint64_t kernel = 65530;   // vm.max_map_count
  std::uint64_t reserve = 16384;  // for sessions, threads, code, drivers

  // The limit of this machine, for this number of sessions.
  static MappingLimit of_kernel(std::uint32_t max_sessions);
  std::uint64_t allowed() const { return kernel - reserve; }
};

class MappingCount {
 public:
  void set_limit(const MappingLimit& limit) { limit_ = limit; }
  // RESOURCE_EXHAUSTED, with the numbers, if a process that must map the rank's memory has too few mappings
  // left. Also if the user who owns the group would have more than half of the mappings.
  Status add(std::pair<std::uint64_t, std::uint32_t> member, std::uint32_t uid,
             const device::DeviceName& device);
  void remove(std::pair<std::uint64_t, std::uint32_t> member);
  // The mappings of all users.
  std::uint64_t of_engine(const device::DeviceName& device) const;

 private:
  using Process = std::string;  // as messages name it
  struct Group {
    std::uint32_t uid = 0;
    std::map<std::uint32_t, Process> ranks;    // their engines
    std::map<Process, std::uint64_t> engines;  // its ranks on each engine
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
