// The holdings of a process, as /proc tells them. For leak checks: take a census, do the work, compare.
#pragma once

#include <sys/types.h>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace epd::test {

// Without the fake driver's memory of cuMemAlloc.
struct Census {
  std::size_t fds = 0;
  std::size_t memfds = 0;    // descriptors of memfds
  std::size_t mappings = 0;  // lines of /proc/PID/maps
  std::size_t memfd_mappings = 0;
  std::size_t threads = 0;
  std::uint64_t own_kib = 0;     // RssAnon + RssFile: resident without shared memory
  std::uint64_t shared_kib = 0;  // RssShmem

  std::string to_string() const;
};

// Whether own_kib says what a process uses: sanitizers keep freed memory in quarantine, and touch shadow
// pages.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kMemoryIsOurs = false;
#else
inline constexpr bool kMemoryIsOurs = true;
#endif

// All zero if the process is gone.
Census take_census(pid_t pid);

// Open descriptors of the calling process.
std::size_t count_own_fds();

// utime + stime in milliseconds.
std::uint64_t cpu_ms(pid_t pid);

// Living (not zombie) children of a process.
std::vector<pid_t> children_of(pid_t pid);

// Bytes of all memfds that a process has open, by the names that their makers gave them.
std::map<std::string, std::uint64_t> memory_objects(pid_t pid);

// The memfds that a process has open, and the processes that have one of them open or mapped.
std::set<ino_t> memfds_of(pid_t pid);
std::vector<pid_t> holders_of(const std::set<ino_t>& memfds);

// As /proc/PID/stat has it: R running, S asleep, T stopped, t traced, Z zombie; X if there is none.
char process_state(pid_t pid);
// Neither dead nor a zombie.
bool is_running(pid_t pid);

}  // namespace epd::test
