// epctl doctor: gathers facts, and prints what doctor_rules.cpp and doctor_cluster.cpp find in them.
#include "doctor.h"

#include "commands.h"
#include "format.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <sstream>
#include <string_view>
#include <system_error>

namespace epd::ctl {

// ---- doctor host

namespace {

constexpr int kConnectMs = 1'000;
constexpr int kMaxPorts = 64;  // of a large cluster only the first ones
constexpr std::uint64_t kProbeBytes = std::uint64_t{1} << 20;

std::uint64_t limit(rlim_t value) {
  return value == RLIM_INFINITY ? kUnlimited : value;
}

// Tries to make a segment as the daemon does. Returns why that fails, or "".
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

// Returns "" if somebody takes connections there.
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

// ---- doctor

namespace {

using Kind = SocketFile::Kind;

void note_stale(const std::string& path, SocketFile& file) {
  if (file.kind == Kind::kUsable && is_stale(path)) file.kind = Kind::kStale;
}

// Chooses like clients do: the first of several paths, with colons between them, where a daemon may listen,
// or else the first path.
void find_attach_socket(const std::string& paths, DaemonFacts& facts) {
  for (std::size_t begin = 0; begin <= paths.size();) {
    const std::size_t end = std::min(paths.find(':', begin), paths.size());
    const std::string path = paths.substr(begin, end - begin);
    SocketFile file = look_at_socket(path);
    note_stale(path, file);
    const bool found = file.kind != Kind::kMissing && file.kind != Kind::kStale;
    if (found || begin == 0) {
      facts.attach_path = path;
      facts.attach_file = std::move(file);
    }
    if (found) return;
    begin = end + 1;
  }
}

DaemonFacts ask_daemon(const Arguments& arguments, Connection& connection) {
  DaemonFacts facts;
  facts.control_path = arguments.socket;
  facts.control_file = look_at_socket(arguments.socket);
  const auto start = std::chrono::steady_clock::now();
  facts.failure = connection.try_call(v1::GetVersionRequest(), facts.version);
  const auto time = std::chrono::steady_clock::now() - start;
  facts.answer_us =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
  if (!facts.failure) facts.failure = connection.try_call(v1::GetStatusRequest(), facts.status);
  if (facts.failure) {
    facts.version.Clear();
    facts.status.Clear();
  }
  if (!facts.failure) {
    facts.attach_path = facts.status.daemon().socket_path();
    if (!facts.attach_path.empty()) facts.attach_file = look_at_socket(facts.attach_path);
    facts.open_files = open_files_of(facts.status.daemon().pid());
    return facts;
  }
  note_stale(facts.control_path, facts.control_file);
  if (!arguments.attach_socket.empty()) {
    find_attach_socket(arguments.attach_socket, facts);
  } else if (arguments.socket == kDefaultSocket) {  // where another daemon's is, only the daemon knows
    find_attach_socket("/run/epd/epd.sock", facts);
  }
  return facts;
}

// The words for a level in JSON and in text, and its colour.
struct LevelWords {
  const char* json;
  const char* text;
  const char* colour;
};
const LevelWords& words_of(Level level) {
  static constexpr LevelWords kWords[] = {
      {"ok", "OK", "\x1b[32m"}, {"warn", "WARN", "\x1b[33m"}, {"fail", "FAIL", "\x1b[31m"}};
  return kWords[static_cast<std::size_t>(level)];
}

std::size_t count(const std::vector<Check>& checks, Level level) {
  return static_cast<std::size_t>(
      std::count_if(checks.begin(), checks.end(), [&](const Check& check) { return check.level == level; }));
}

std::string text_of(const std::vector<Check>& checks, bool colour) {
  std::size_t width = 0;
  for (const Check& check : checks) width = std::max(width, printable(check.name).size());
  const auto padded = [](std::string text, std::size_t columns) {
    text.resize(std::max(text.size(), columns), ' ');
    return text;
  };
  std::string text;
  for (const Check& check : checks) {
    const LevelWords& words = words_of(check.level);
    const std::string level = padded(words.text, 6);
    text += colour ? words.colour + level + "\x1b[0m" : level;
    text += padded(printable(check.name), width + 2) + printable(check.text) + "\n";
    if (!check.advice.empty())
      text += std::string(6 + width + 2, ' ') + "-> " + printable(check.advice) + "\n";
  }
  return text + "\n" + std::to_string(count(checks, Level::kOk)) + " ok, " +
         counted(count(checks, Level::kWarn), "warning") + ", " +
         std::to_string(count(checks, Level::kFail)) + " failed\n";
}

Json json_of(const std::vector<Check>& checks) {
  Json document = {{"checks", Json::array()}};
  for (const Check& check : checks) {
    document["checks"].push_back({{"level", words_of(check.level).json},
                                  {"name", check.name},
                                  {"text", check.text},
                                  {"advice", check.advice}});
  }
  for (const Level level : {Level::kOk, Level::kWarn, Level::kFail})
    document[words_of(level).json] = count(checks, level);
  return document;
}

}  // namespace

Exit run_doctor(const Context& context) {
  Connection& connection = context.connection;
  const DaemonFacts daemon = ask_daemon(context.arguments, connection);
  std::vector<Check> checks = judge_daemon(daemon, own_version());
  const auto append = [&](std::vector<Check> more) {
    checks.insert(checks.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  if (!daemon.failure) {
    append(judge_devices(daemon.status));
    append(judge_gpus(daemon.status));
    v1::GetConfigResponse config;
    if (!connection.try_call(v1::GetConfigRequest(), config)) append(judge_choice(config, daemon));
    v1::ListGroupsResponse groups;
    if (!connection.try_call(v1::ListGroupsRequest(), groups)) append(judge_rows(groups));
    if (daemon.status.daemon().has_cluster()) {
      ClusterFacts cluster;
      if (const auto failure = connection.try_call(v1::ListNodesRequest(), cluster.nodes)) {
        append({fail("cluster", "its state can't be read", failure->message)});
      } else {
        cluster.ports = probe_ports(cluster.nodes);
        append(judge_cluster(cluster));
      }
      if (const auto failure = connection.try_call(v1::ListFarEnginesRequest(), cluster.network)) {
        append({fail("network", "its state can't be read", failure->message)});
      } else {
        cluster.interfaces = probe_interfaces();
        append(judge_network(cluster));
      }
    }
  }
  append(judge_host(probe_host(), daemon.status));
  context.answer(json_of(checks), text_of(checks, context.output.colour));
  const bool problems =
      count(checks, Level::kFail) != 0 || (context.arguments.strict && count(checks, Level::kWarn) != 0);
  return problems ? Exit::kProblems : Exit::kOk;
}

}  // namespace epd::ctl
