#include "kit/nodes.h"

#include "kit/daemon.h"
#include "kit/error.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <thread>

namespace epd::kit {

// ---- node network

namespace {

constexpr int kNamespaces = CLONE_NEWNET | CLONE_NEWIPC;
// Room for several packets of TCP's largest size.
constexpr const char* kBurst = "256kb";
constexpr const char* kLatency = "50ms";

// The thread takes with it what `body` did to its namespaces.
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
  // The trial runs in a process of its own, which may become root of a user namespace.
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
  // IPv6 would send packets of its own, which would be counted.
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

// 198.18.0.0/15 is the range for measurements of networks (RFC 2544).
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

// ---- nodes

namespace {

constexpr int kPort = 7410;
constexpr std::chrono::seconds kPatience{30};

std::string name_of(std::uint32_t node) {
  return "node-" + std::to_string(node);
}

std::string endpoint_of(const NodeNetwork& network, std::uint32_t node) {
  return network.address(node) + ":" + std::to_string(kPort);
}

std::size_t nodes_up(const std::string& told) {
  const auto table = nlohmann::json::parse(told, nullptr, false);
  if (table.is_discarded() || !table.contains("nodes")) return 0;
  const auto& rows = table.at("nodes");
  return static_cast<std::size_t>(
      std::count_if(rows.begin(), rows.end(), [](const auto& row) { return row.at("state") == "up"; }));
}

}  // namespace

RankPlace place_of(std::uint32_t rank, std::uint32_t ranks, std::uint32_t nodes) {
  const std::uint32_t each = ranks / nodes;
  const std::uint32_t larger = ranks % nodes;  // nodes with one more
  const std::uint32_t in_larger = larger * (each + 1);
  if (rank < in_larger) return {rank / (each + 1), rank % (each + 1)};
  return {larger + (rank - in_larger) / each, (rank - in_larger) % each};
}

std::string OwnNodes::why_not() {
  if (!has_command("openssl")) return "openssl is missing";
  return NodeNetwork::why_not();
}

OwnNodes::OwnNodes(const NodesOptions& options) : check_(options.check) {
  if (options.nodes > 1) {
    if (const std::string why = why_not(); !why.empty()) fail("nodes can't be made here: " + why);
    network_.emplace(options.nodes, options.rate);
    directory_ = make_temporary_directory();
    make_certificates();
  }
  for (std::uint32_t node = 0; node < options.nodes; ++node) {
    DaemonOptions one;
    one.program = options.program;
    one.host_devices = options.devices;
    one.sms = options.sms;
    if (network_) {
      one.settings = cluster_settings(node);
      one.in_child = [this, node] {
        if (*network_->enter(node) != '\0') ::_exit(126);
      };
    }
    daemons_.push_back(std::make_unique<OwnDaemon>(one));
  }
  if (network_) await_all();
}

OwnNodes::~OwnNodes() {
  stop();
}

void OwnNodes::make_certificates() {
  std::vector<std::string> words{"bash", executable_directory() + "/" EPD_KIT_TEST_CA, directory_};
  for (std::uint32_t node = 0; node < network_->size(); ++node)
    words.push_back(name_of(node) + "," + network_->address(node));
  must_run(words);
}

std::string OwnNodes::cluster_settings(std::uint32_t node) const {
  const std::string files = directory_ + "/" + name_of(node);
  const std::string own = endpoint_of(*network_, node);
  std::string text = "[cluster]\n";
  for (const auto& [key, value] : {std::pair<const char*, std::string>{"name", "tools"},
                                   {"node", name_of(node)},
                                   {"listen", own},
                                   {"advertise", own},
                                   {"coordinator", endpoint_of(*network_, 0)},
                                   {"tls_ca", directory_ + "/ca.pem"},
                                   {"tls_cert", files + ".pem"},
                                   {"tls_key", files + ".key"}})
    text += std::string(key) + " = \"" + value + "\"\n";
  if (!check_.empty()) text += "[network]\ncheck = \"" + check_ + "\"\n";
  return text;
}

// Returns when each node sees all nodes up.
void OwnNodes::await_all() const {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (std::uint32_t node = 0; node < size();) {
    std::string told;
    try {
      told = epctl(daemons_[node]->control_socket(), {"nodes"});
    } catch (const ToolError& error) {
      told = error.what();
    }
    if (nodes_up(told) == size()) {
      ++node;
      continue;
    }
    if (std::chrono::steady_clock::now() > end) {
      fail(name_of(node) + " does not see all " + std::to_string(size()) + " nodes up after " +
           std::to_string(kPatience.count()) + " s: " + told + log_tail());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

std::vector<pid_t> OwnNodes::pids() const {
  std::vector<pid_t> pids;
  for (const auto& daemon : daemons_) pids.push_back(daemon->pid());
  return pids;
}

std::uint64_t OwnNodes::link_bytes() const {
  std::uint64_t bytes = 0;
  for (std::uint32_t node = 0; network_ && node < network_->size(); ++node)
    bytes += network_->traffic(node).sent_bytes;
  return bytes;
}

std::string OwnNodes::log_tail() const {
  std::string text;
  for (std::uint32_t node = 0; node < size(); ++node)
    text += daemons_[node]->log_tail(network_ ? "the daemon of " + name_of(node) : "the daemon");
  return text;
}

std::string OwnNodes::stop() {
  std::string outcome;
  // The coordinator stops last, so that the others can leave the cluster.
  for (auto daemon = daemons_.rbegin(); daemon != daemons_.rend(); ++daemon) {
    const std::string what = (*daemon)->stop();
    if (outcome.empty()) outcome = what;
  }
  daemons_.clear();
  std::error_code ignored;
  if (!directory_.empty()) std::filesystem::remove_all(directory_, ignored);
  return outcome;
}

}  // namespace epd::kit
