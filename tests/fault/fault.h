// The common parts of the fault tests.
#pragma once

#include "support/cases.h"
#include "support/census.h"
#include "support/client.h"
#include "support/cuda_memory.h"
#include "support/daemon.h"
#include "support/rank_bodies.h"
#include "support/ranks.h"
#include "support/script.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace epd::test {

// Engines that are killed often must not be given up, nor be waited for long.
std::vector<std::pair<std::string, std::string>> patient_settings();

Case fault_case(std::uint32_t num_ranks, std::uint32_t depth = 3);

// Supervisor first, then the engines.
struct SystemCensus {
  std::vector<Census> processes;
  std::string to_string() const;
};
SystemCensus take_system_census(const Daemon& daemon);
// The same once nothing has changed for a while: sessions end a moment after their client. Without clients it
// waits until nothing of any session or group is left, those of Daemon::start included.
SystemCensus settled_census(const Daemon& daemon, bool with_clients = false);
// Waits until descriptors, memfds, shared mappings and threads are what they were; a test failure
// with both censuses if they don't get there.
void expect_same_census(const Daemon& daemon, const SystemCensus& before);
// Memfds that the supervisor and the engines hold: what is alive of segments, boards and arenas.
std::size_t memfds_held(const Daemon& daemon);
std::size_t settled_memfds(const Daemon& daemon);

// Makes a process run in a circle for good, its other threads aside: hung, as /proc can't tell. False where
// that is not known how.
bool hang_process(pid_t pid);

// All ranks of a case in a group of their own: does the daemon still serve?
void expect_serves(const Daemon& daemon, std::uint32_t num_ranks, const std::string& group);

}  // namespace epd::test
