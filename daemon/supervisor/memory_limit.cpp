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

// In a container `root` is often that of the container's own cgroup, while `path` begins at the host's. So
// the directories of `path` may be missing. A path out of the cgroup namespace ("/../x") is not below `root`.
std::uint64_t least_limit(const std::filesystem::path& root, const std::string& path, const char* file) {
  std::uint64_t least = number_in(root / file);
  std::filesystem::path directory = root;
  for (const std::filesystem::path& part : std::filesystem::path(path).relative_path()) {
    if (part == "..") break;
    directory /= part;
    least = std::min(least, number_in(directory / file));
  }
  return least;
}

bool has_memory(const std::string& controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

std::uint64_t machine_memory_bytes() {
  const auto pages = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES));
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

std::uint64_t cgroup_memory_bytes(const std::string& memberships, const std::string& root) {
  std::uint64_t least = kNone;
  std::istringstream lines(memberships);
  for (std::string line; std::getline(lines, line);) {  // "0::/a/b" (v2), "5:memory:/a/b" (v1)
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) least = std::min(least, least_limit(root, path, "memory.max"));
    if (has_memory(controllers))
      least = std::min(least, least_limit(root + "/memory", path, "memory.limit_in_bytes"));
  }
  return least;
}

std::uint64_t available_memory_bytes() {
  static const std::uint64_t bytes = [] {
    std::stringstream memberships;
    memberships << std::ifstream("/proc/self/cgroup").rdbuf();
    return std::min(machine_memory_bytes(), cgroup_memory_bytes(memberships.str(), "/sys/fs/cgroup"));
  }();
  return bytes;
}

}  // namespace epd::supervisor
