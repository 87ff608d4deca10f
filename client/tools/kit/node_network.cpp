#include "kit/node_network.h"

#include "kit/command.h"
#include "kit/error.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

namespace epd::kit {
namespace {

constexpr int kNamespaces = CLONE_NEWNET | CLONE_NEWIPC;
// Some packets as large as TCP makes them.
constexpr const char* kBurst = "256kb";
constexpr const char* kLatency = "50ms";

// What it does to its thread's namespaces goes with the thread.
void on_own_thread(const std::function<void()>& body) {
  std::exception_ptr failure;
  std::thread([&] {
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

bool may_make_namespaces() {
  bool may = false;
  on_own_thread([&] { may = ::unshare(kNamespaces) == 0; });
  return may;
}

void write_file(const char* path, const std::string& text) {
  std::ofstream file(path);
  if (!(file << text).flush()) fail(std::string("writing '") + text + "' to " + path + " failed");
}

void become_root_of_a_user_namespace() {
  const std::string user = std::to_string(::geteuid());
  const std::string group = std::to_string(::getegid());
  if (::unshare(CLONE_NEWUSER) != 0) {
    fail(std::string("network namespaces need root or user namespaces, and a user namespace is refused: ") +
         std::strerror(errno));
  }
  write_file("/proc/self/setgroups", "deny");
  write_file("/proc/self/uid_map", "0 " + user + " 1");
  write_file("/proc/self/gid_map", "0 " + group + " 1");
}

UniqueFd open_own(const char* path) {
  UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) fail_errno(std::string("opening ") + path);
  return fd;
}

std::string port_of(std::uint32_t node) {
  return "node" + std::to_string(node);
}

}  // namespace

double bits_per_second(const std::string& rate) {
  if (rate.empty()) return 0;
  std::uint32_t number = 0;
  const auto [unit, error] = std::from_chars(rate.data(), rate.data() + rate.size(), number);
  for (const auto& [name, factor] :
       {std::pair{"kbit", 1e3}, std::pair{"mbit", 1e6}, std::pair{"gbit", 1e9}}) {
    if (error == std::errc{} && number != 0 && unit == std::string(name)) return number * factor;
  }
  fail("rate is '" + rate + "'; allowed: a number of kbit, mbit or gbit, as 4gbit");
}

std::string NodeNetwork::why_not() {
  for (const char* name : {"ip", "tc"}) {
    if (!has_command(name)) return std::string(name) + " is missing (iproute2)";
  }
  // In a process of its own, which may become root of a user namespace.
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail_errno("making a pipe");
  const UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  const pid_t pid = ::fork();
  if (pid < 0) fail_errno("fork");
  if (pid == 0) {
    std::string why;
    try {
      const NodeNetwork trial(2, "1gbit");
    } catch (const std::exception& error) {
      why = error.what();
    }
    const bool written = ::write(write_end.get(), why.data(), why.size()) == static_cast<ssize_t>(why.size());
    ::_exit(written ? 0 : 1);
  }
  write_end.reset();
  std::string why;
  char part[512];
  for (ssize_t got = 0; (got = ::read(read_end.get(), part, sizeof(part))) > 0;)
    why.append(part, static_cast<std::size_t>(got));
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status == 0 ? why : "the trial ended with status " + std::to_string(status);
}

NodeNetwork::NodeNetwork(std::uint32_t nodes, const std::string& rate) {
  if (nodes > kMaxNodes) {
    fail("nodes is " + std::to_string(nodes) + "; allowed: 0.." + std::to_string(kMaxNodes));
  }
  bits_per_second(rate);
  if (!may_make_namespaces()) become_root_of_a_user_namespace();
  bridge_ = make_namespaces();
  run_in(bridge_, {"ip", "link", "add", "name", "switch", "type", "bridge"});
  run_in(bridge_, {"ip", "link", "set", "dev", "switch", "up"});
  for (std::uint32_t i = 0; i < nodes; ++i) add_node(rate);
}

NodeNetwork::Namespaces NodeNetwork::make_namespaces() {
  Namespaces made;
  on_own_thread([&made] {
    if (::unshare(kNamespaces) != 0) fail_errno("unshare of network and IPC namespaces");
    made.network = open_own("/proc/thread-self/ns/net");
    made.ipc = open_own("/proc/thread-self/ns/ipc");
    made.counters = open_own("/proc/thread-self/net/dev");
  });
  return made;
}

void NodeNetwork::add_node(const std::string& rate) {
  const std::uint32_t node = size();
  Namespaces& place = nodes_.emplace_back(make_namespaces());
  const std::string port = port_of(node);
  const std::string there =
      "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(place.network.get());
  run_in(bridge_,
         {"ip", "link", "add", "name", port, "type", "veth", "peer", "name", kInterface, "netns", there});
  run_in(bridge_, {"ip", "link", "set", "dev", port, "master", "switch", "up"});
  run_in(place, {"ip", "link", "set", "dev", "lo", "up"});
  // No packets of IPv6's own among those that are counted.
  run_in(place, {"ip", "link", "set", "dev", kInterface, "addrgenmode", "none", "up"});
  run_in(place, {"ip", "address", "add", address(node) + "/24", "dev", kInterface});
  if (rate.empty()) return;
  run_in(place, {"tc", "qdisc", "add", "dev", kInterface, "root", "tbf", "rate", rate, "burst", kBurst,
                 "latency", kLatency});
}

void NodeNetwork::run_in(const Namespaces& place, const std::vector<std::string>& words) const {
  CommandOptions options;
  const int network = place.network.get();
  options.in_child = [network] {
    if (::setns(network, CLONE_NEWNET) != 0) ::_exit(126);
  };
  must_run(words, options);
}

// Of the network for measurements of networks (RFC 2544).
std::string NodeNetwork::address(std::uint32_t node) const {
  return "198.18.0." + std::to_string(node + 1);
}

const char* NodeNetwork::enter(std::uint32_t node) const {
  if (::setns(nodes_[node].network.get(), CLONE_NEWNET) != 0) return "setns to the node's network";
  if (::setns(nodes_[node].ipc.get(), CLONE_NEWIPC) != 0) return "setns to the node's IPC namespace";
  // A sysfs has the interfaces of the network in which it was mounted, and UCX looks for them there.
  if (::unshare(CLONE_NEWNS) != 0) return "unshare of the mount namespace";
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return "mount of / as private";
  if (::mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0)
    return "mount of /sys";
  return "";
}

Traffic NodeNetwork::traffic(std::uint32_t node) const {
  char text[4096];
  const ssize_t got = ::pread(nodes_[node].counters.get(), text, sizeof(text), 0);
  std::istringstream lines(std::string(text, got > 0 ? static_cast<std::size_t>(got) : 0));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name != std::string(kInterface) + ":") continue;
    // bytes packets errs drop fifo frame compressed multicast, twice.
    std::uint64_t values[10];
    for (std::uint64_t& value : values) words >> value;
    if (words) return {values[8], values[9], values[0], values[1]};
  }
  fail("node " + std::to_string(node) + " has no counters of " + kInterface);
}

void NodeNetwork::plug(std::uint32_t node) {
  run_in(bridge_, {"ip", "link", "set", "dev", port_of(node), "up"});
}

void NodeNetwork::unplug(std::uint32_t node) {
  run_in(bridge_, {"ip", "link", "set", "dev", port_of(node), "down"});
}

}  // namespace epd::kit
