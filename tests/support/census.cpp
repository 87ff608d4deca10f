#include "support/census.h"

#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

fs::path proc(pid_t pid, const char* file) {
  return fs::path("/proc") / std::to_string(pid) / file;
}

// Fields of /proc/PID/stat from the state on (the name before it may hold anything).
std::vector<std::string> stat_fields(pid_t pid) {
  std::ifstream in(proc(pid, "stat"));
  std::string line;
  std::getline(in, line);
  const std::size_t end = line.rfind(')');
  std::vector<std::string> fields;
  if (end == std::string::npos) return fields;
  std::istringstream rest(line.substr(end + 1));
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
}

void for_each_memfd(pid_t pid, const std::function<void(const std::string&, const struct stat&)>& look) {
  const std::string prefix = "/memfd:";
  std::error_code error;
  for (fs::directory_iterator it(proc(pid, "fd"), error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    struct stat file {};
    const std::string target = fs::read_symlink(it->path(), gone).string();  // "/memfd:NAME (deleted)"
    if (target.starts_with(prefix) && ::stat(it->path().c_str(), &file) == 0)
      look(target.substr(prefix.size(), target.find(" (deleted)") - prefix.size()), file);
  }
}

// Memory of cuMemAlloc, which only the fake driver keeps in memfds. Engines keep theirs for later.
bool is_of_malloc(const std::string& path) {
  return path.find("/memfd:epd_fake_cuda_malloc") != std::string::npos;
}

std::vector<pid_t> all_processes() {
  std::vector<pid_t> pids;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; }))
      pids.push_back(static_cast<pid_t>(std::stol(name)));
  }
  return pids;
}

}  // namespace

std::string Census::to_string() const {
  std::ostringstream out;
  out << "fds " << fds << ", memfds " << memfds << ", mappings " << mappings << " (memfd " << memfd_mappings
      << "), threads " << threads << ", own " << own_kib << " KiB, shared " << shared_kib << " KiB";
  return out.str();
}

Census take_census(pid_t pid) {
  Census census;
  std::error_code error;
  for (fs::directory_iterator it(proc(pid, "fd"), error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    const std::string target = fs::read_symlink(it->path(), gone).string();
    if (gone || is_of_malloc(target)) continue;
    ++census.fds;
    if (target.rfind("/memfd:", 0) == 0) ++census.memfds;
  }
  std::string line;
  for (std::ifstream maps(proc(pid, "maps")); std::getline(maps, line);) {
    ++census.mappings;
    if (line.find("/memfd:") != std::string::npos && !is_of_malloc(line)) ++census.memfd_mappings;
  }
  for (std::ifstream status(proc(pid, "status")); std::getline(status, line);) {
    std::istringstream in(line);
    std::string key;
    std::uint64_t value = 0;
    in >> key >> value;
    if (key == "RssAnon:" || key == "RssFile:") census.own_kib += value;
    if (key == "RssShmem:") census.shared_kib += value;
    if (key == "Threads:") census.threads = value;
  }
  return census;
}

std::size_t count_own_fds() {
  // The directory's own descriptor is open while it is being read, and so is counted each time.
  const fs::directory_iterator entries("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

std::uint64_t cpu_ms(pid_t pid) {
  const std::vector<std::string> fields = stat_fields(pid);
  if (fields.size() < 13) return 0;
  const std::uint64_t ticks = std::stoull(fields[11]) + std::stoull(fields[12]);
  return ticks * 1000 / static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
}

std::vector<pid_t> children_of(pid_t pid) {
  std::vector<pid_t> children;
  for (const pid_t candidate : all_processes()) {
    const std::vector<std::string> fields = stat_fields(candidate);
    if (fields.size() > 1 && fields[0] != "Z" && fields[1] == std::to_string(pid))
      children.push_back(candidate);
  }
  std::sort(children.begin(), children.end());
  return children;
}

std::map<std::string, std::uint64_t> memory_objects(pid_t pid) {
  std::map<std::string, std::uint64_t> bytes;
  for_each_memfd(pid, [&](const std::string& name, const struct stat& file) {
    bytes[name] += static_cast<std::uint64_t>(file.st_size);
  });
  return bytes;
}

std::set<ino_t> memfds_of(pid_t pid) {
  std::set<ino_t> inodes;
  for_each_memfd(pid, [&](const std::string&, const struct stat& file) { inodes.insert(file.st_ino); });
  return inodes;
}

std::vector<pid_t> holders_of(const std::set<ino_t>& memfds) {
  std::vector<pid_t> holders;
  for (const pid_t pid : all_processes()) {
    const std::set<ino_t> open = memfds_of(pid);
    bool holds = std::any_of(open.begin(), open.end(), [&](ino_t inode) { return memfds.contains(inode); });
    std::string line;
    for (std::ifstream maps(proc(pid, "maps")); !holds && std::getline(maps, line);) {
      if (line.find("/memfd:") == std::string::npos) continue;
      std::istringstream in(line);
      std::string skipped;
      ino_t inode = 0;
      in >> skipped >> skipped >> skipped >> skipped >> inode;
      holds = memfds.contains(inode);
    }
    if (holds) holders.push_back(pid);
  }
  return holders;
}

char process_state(pid_t pid) {
  const std::vector<std::string> fields = stat_fields(pid);
  return fields.empty() ? 'X' : fields[0][0];
}

bool is_running(pid_t pid) {
  const char state = process_state(pid);
  return state != 'Z' && state != 'X';
}

}  // namespace epd::test
