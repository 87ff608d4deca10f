// What epctl doctor finds out itself: limits, /proc and /sys of this host, and whether nodes can be reached
// from it.
#include "doctor.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>

namespace epd::ctl {
namespace {

constexpr int kConnectMs = 1'000;
constexpr int kMaxPorts = 64;  // of a large cluster the first ones
constexpr std::uint64_t kProbeBytes = std::uint64_t{1} << 20;

std::uint64_t limit(rlim_t value) {
  return value == RLIM_INFINITY ? kUnlimited : value;
}

// Why a segment as the daemon makes them can't be made here; empty if it can.
std::string try_memfd() {
  const auto why = [](const char* call) { return std::string(call) + ": " + std::strerror(errno); };
  const int fd = ::memfd_create("epctl-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return why("memfd_create");
  std::string error;
  void* memory = MAP_FAILED;
  if (::ftruncate(fd, kProbeBytes) != 0) {
    error = why("ftruncate");
  } else if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    error = why("F_ADD_SEALS");
  } else if ((memory = ::mmap(nullptr, kProbeBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) ==
             MAP_FAILED) {
    error = why("mmap");
  }
  if (memory != MAP_FAILED) {
    // A page that can't be had kills the process, so ask without touching.
    if (::fallocate(fd, 0, 0, kProbeBytes) != 0) error = why("fallocate");
    ::munmap(memory, kProbeBytes);
  }
  ::close(fd);
  return error;
}

// The word in brackets of "always within_size [never] advise".
std::string chosen_word(const char* path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  const std::size_t begin = line.find('[');
  const std::size_t end = line.find(']');
  return begin == std::string::npos || end == std::string::npos ? ""
                                                                : line.substr(begin + 1, end - begin - 1);
}

// cgroup v2: "max 100000" or "<quota> <period>", in microseconds.
double cgroup_cores() {
  std::string quota;
  double period = 0;
  std::ifstream("/sys/fs/cgroup/cpu.max") >> quota >> period;
  if (quota.empty() || quota == "max" || period <= 0) return 0;
  return std::strtod(quota.c_str(), nullptr) / period;
}

void read_memory(HostFacts& host) {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string key;
    std::uint64_t kib = 0;
    fields >> key >> kib;
    if (key == "MemTotal:") host.memory_bytes = kib * 1024;
    if (key == "MemAvailable:") host.available_bytes = kib * 1024;
    if (key == "SwapTotal:") host.swap_bytes = kib * 1024;
  }
}

// Empty: somebody takes connections there.
std::string connect_error(const addrinfo& address) {
  const UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return std::strerror(errno);
  int error = ::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd entry{fd.get(), POLLOUT, 0};
    socklen_t size = sizeof(error);
    error = ETIMEDOUT;
    if (::poll(&entry, 1, kConnectMs) == 1) ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  return error == 0 ? "" : std::strerror(error);
}

void look_at(PortFacts& port) {
  const std::size_t colon = port.address.rfind(':');
  if (colon == std::string::npos) {
    port.error = "it is no HOST:PORT";
    return;
  }
  std::string host = port.address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), port.address.substr(colon + 1).c_str(), &hints, &found);
  if (failed != 0) {
    port.error = "host " + host + " has no address: " + ::gai_strerror(failed);
    return;
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(found, ::freeaddrinfo);
  port.resolved = true;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    port.error = connect_error(*address);
    if (port.error.empty()) return;
  }
}

}  // namespace

HostFacts probe_host() {
  HostFacts host;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    host.cores = static_cast<unsigned>(CPU_COUNT(&set));
  } else {
    host.cores = static_cast<unsigned>(::sysconf(_SC_NPROCESSORS_ONLN));
  }
  host.cpu_quota = cgroup_cores();
  rlimit files{};
  rlimit locked{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  ::getrlimit(RLIMIT_MEMLOCK, &locked);
  host.open_files = limit(files.rlim_cur);
  host.open_files_hard = limit(files.rlim_max);
  host.locked_bytes = limit(locked.rlim_cur);
  host.memfd_error = try_memfd();
  host.shmem_huge = chosen_word("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  read_memory(host);
  return host;
}

std::optional<std::uint64_t> open_files_of(std::int32_t pid) {
  const std::string directory = "/proc/" + std::to_string(pid);
  std::string name;
  std::getline(std::ifstream(directory + "/comm"), name);
  if (name != "epd") return std::nullopt;  // another pid namespace, or gone
  std::ifstream file(directory + "/limits");
  std::string line;
  while (std::getline(file, line)) {
    constexpr std::string_view kKey = "Max open files";
    if (!line.starts_with(kKey)) continue;
    std::string soft;
    std::istringstream(line.substr(kKey.size())) >> soft;
    return soft == "unlimited" ? kUnlimited : std::strtoull(soft.c_str(), nullptr, 10);
  }
  return std::nullopt;
}

std::vector<PortFacts> probe_ports(const v1::ListNodesResponse& nodes) {
  std::vector<PortFacts> ports;
  const v1::ClusterStatus& cluster = nodes.cluster();
  if (!cluster.coordinates()) ports.push_back({"coordinator", cluster.coordinator(), "", false});
  for (const v1::Node& node : nodes.nodes()) {
    const bool known = node.coordinator() && !node.own();  // that is the line above
    const bool gone = node.state() == v1::NODE_STATE_LOST;
    if (!known && !gone && ports.size() < kMaxPorts)
      ports.push_back({"node " + node.name(), node.address(), "", false});
  }
  for (PortFacts& port : ports) look_at(port);
  return ports;
}

std::set<std::string> probe_interfaces() {
  std::set<std::string> names;
  for (const char* directory : {"/sys/class/net", "/sys/class/infiniband"}) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(directory, error))
      names.insert(entry.path().filename());
  }
  return names;
}

}  // namespace epd::ctl
