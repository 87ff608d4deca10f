// How much memory this process may have.
#pragma once

#include <cstdint>
#include <string>

namespace epd::supervisor {

// The machine's memory, or less if a cgroup of this process has less. As at the first call.
std::uint64_t available_memory_bytes();

// The part of available memory that a user who has filled it may keep.
inline std::uint64_t max_bytes_of_filler() {
  return available_memory_bytes() / 4;
}

// The least limit of the memory cgroups of a process and of all cgroups above them. `memberships`: what
// /proc/PID/cgroup says. `root`: where cgroups are mounted, as /sys/fs/cgroup. UINT64_MAX: none can be read.
std::uint64_t cgroup_memory_bytes(const std::string& memberships, const std::string& root);

// How many processes of this process's cgroup the kernel's OOM killer has ended; 0 where that can't be read.
std::uint64_t oom_kills();
// The same of the cgroups that are given as above.
std::uint64_t cgroup_oom_kills(const std::string& memberships, const std::string& root);

}  // namespace epd::supervisor
