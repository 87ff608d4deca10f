#include "memory_limit.h"

#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

// kNone: it can't be read, or is no number ("max").
std::uint64_t number_in(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::uint64_t number = 0;
  return in >> number ? number : kNone;
}

// Reads the number in the file's line "oom_kill 3".
std::uint64_t oom_kills_in(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string key;
  for (std::uint64_t number = 0; in >> key >> number;) {
    if (key == "oom_kill") return number;
  }
  return kNone;
}

bool has_memory(const std::string& controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

std::uint64_t machine_memory_bytes() {
  const auto pages = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES));
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string memberships_of_this_process() {
  std::stringstream memberships;
  memberships << std::ifstream("/proc/self/cgroup").rdbuf();
  return memberships.str();
}

// Calls visit(directory, whether it is of version 1) for the memory cgroups and all above them, outermost
// first. In a container `root` is often that of the container's own cgroup, while paths begin at the host's.
// So directories may be missing. A path out of the cgroup namespace ("/../x") is not below `root`.
template <typename Visit>
void each_memory_cgroup(const std::string& memberships, const std::string& root, const Visit& visit) {
  std::istringstream lines(memberships);
  for (std::string line; std::getline(lines, line);) {  // "0::/a/b" (v2), "5:memory:/a/b" (v1)
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool old = has_memory(controllers);
    if (!controllers.empty() && !old) continue;
    std::filesystem::path directory = old ? root + "/memory" : root;
    visit(directory, old);
    for (const std::filesystem::path& part : std::filesystem::path(line.substr(second + 1)).relative_path()) {
      if (part == "..") break;
      directory /= part;
      visit(directory, old);
    }
  }
}

}  // namespace

std::uint64_t cgroup_memory_bytes(const std::string& memberships, const std::string& root) {
  std::uint64_t least = kNone;
  each_memory_cgroup(memberships, root, [&least](const std::filesystem::path& directory, bool old) {
    least = std::min(least, number_in(directory / (old ? "memory.limit_in_bytes" : "memory.max")));
  });
  return least;
}

// The innermost that there is counts its own processes and those below it.
std::uint64_t cgroup_oom_kills(const std::string& memberships, const std::string& root) {
  std::uint64_t kills = 0;
  each_memory_cgroup(memberships, root, [&kills](const std::filesystem::path& directory, bool old) {
    const std::uint64_t here = oom_kills_in(directory / (old ? "memory.oom_control" : "memory.events"));
    if (here != kNone) kills = here;
  });
  return kills;
}

std::uint64_t oom_kills() {
  return cgroup_oom_kills(memberships_of_this_process(), "/sys/fs/cgroup");
}

std::uint64_t available_memory_bytes() {
  static const std::uint64_t bytes =
      std::min(machine_memory_bytes(), cgroup_memory_bytes(memberships_of_this_process(), "/sys/fs/cgroup"));
  return bytes;
}

}  // namespace epd::supervisor
