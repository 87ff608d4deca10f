#include "support/daemon_cluster.h"

#include "common/fd.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <random>
#include <thread>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

// Nobody listens there now. Below the ports that the kernel gives to others.
std::uint16_t free_port() {
  std::random_device random;
  for (int i = 0; i < 1000; ++i) {
    const auto port = static_cast<std::uint16_t>(20'000 + random() % 12'000);
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return port;
  }
  ADD_FAILURE() << "no port of 20000 .. 31999 is free";
  return 0;
}

Json parse(const CommandResult& result) {
  Json document = Json::parse(result.out, nullptr, false);
  return document.is_discarded() ? Json() : document;
}

}  // namespace

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double until(double seconds, const std::function<bool()>& condition) {
  const double begin = now_seconds();
  while (!condition()) {
    if (now_seconds() > begin + seconds) return -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return now_seconds() - begin;
}

void DaemonCluster::place(const std::string& letter, const std::string& host, std::function<void()> enter) {
  places_[letter] = {host, std::move(enter)};
}

bool DaemonCluster::prepare() {
  std::string pattern = (fs::temp_directory_path() / "epd-nodes-XXXXXX").string();
  directory_ = ::mkdtemp(pattern.data());
  make_certificates(directory_, {"node-a," + host("a"), "node-b", "node-c", "node-d"});
  return !testing::Test::HasFatalFailure();
}

DaemonCluster::~DaemonCluster() {
  // One by one, so that a stopped one, too, is ended.
  for (auto& [letter, daemon] : daemons_) daemon->signal(SIGCONT);
  daemons_.clear();
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

void DaemonCluster::make_certificates(const std::string& directory, const std::vector<std::string>& nodes,
                                      int days) {
  std::vector<std::string> command{EPD_TEST_CA, "--days", std::to_string(days), directory};
  command.insert(command.end(), nodes.begin(), nodes.end());
  const CommandResult result = run_command(command);
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
}

std::uint16_t DaemonCluster::port(const std::string& letter) {
  const auto [entry, is_new] = ports_.try_emplace(letter, 0);
  if (is_new) entry->second = free_port();
  return entry->second;
}

Settings DaemonCluster::settings_of(const std::string& letter, const Settings& more) {
  const std::string files = directory_ + "/node-" + letter;
  Settings settings{{"cluster.name", "\"test\""},
                    {"cluster.node", "\"node-" + letter + "\""},
                    {"cluster.listen", "\"" + address(letter) + "\""},
                    {"cluster.advertise", "\"" + address(letter) + "\""},
                    {"cluster.coordinator", "\"" + address("a") + "\""},
                    {"cluster.tls_ca", "\"" + directory_ + "/ca.pem\""},
                    {"cluster.tls_cert", "\"" + files + ".pem\""},
                    {"cluster.tls_key", "\"" + files + ".key\""}};
  for (const auto& setting : more) {
    std::erase_if(settings, [&](const auto& old) { return old.first == setting.first; });
    if (!setting.second.empty()) settings.push_back(setting);
  }
  return settings;
}

Daemon& DaemonCluster::add(const std::string& letter, const Settings& more) {
  DaemonOptions options;
  options.devices = devices_;
  options.settings = settings_of(letter, more);
  options.in_child = places_[letter].enter;
  return *(daemons_[letter] = std::make_unique<Daemon>(options));
}

Daemon& DaemonCluster::start(const std::string& letter, const Settings& more) {
  Daemon& daemon = add(letter, more);
  EXPECT_TRUE(daemon.start());
  return daemon;
}

Json DaemonCluster::nodes(const Daemon& daemon) {
  return parse(daemon.epctl({"nodes", "--json"}));
}

Json DaemonCluster::status(const Daemon& daemon) {
  return parse(daemon.epctl({"status", "--json"}));
}

Json DaemonCluster::node(const std::string& seen_by, const std::string& letter) {
  const Json table = nodes(at(seen_by));
  if (!table.contains("nodes")) return {};
  for (const Json& row : table["nodes"]) {
    if (row["name"] == "node-" + letter) return row;
  }
  return {};
}

std::string DaemonCluster::state(const std::string& seen_by, const std::string& letter) {
  const Json row = node(seen_by, letter);
  return row.is_null() ? "unknown" : row["state"].get<std::string>();
}

double DaemonCluster::await(const std::string& seen_by, const std::string& letter, const std::string& wanted,
                            double seconds) {
  const double took = until(seconds, [&] { return state(seen_by, letter) == wanted; });
  EXPECT_GE(took, 0) << "node-" << letter << " is not " << wanted << ":\n"
                     << at(seen_by).epctl({"nodes"}).out;
  return took;
}

std::uint64_t DaemonCluster::refused(const std::string& by, const std::string& reason) {
  const Json table = nodes(at(by));
  if (!table.contains("cluster")) return 0;
  for (const Json& entry : table["cluster"]["refusals"]) {
    if (entry["reason"] == reason) return entry["count"].get<std::uint64_t>();
  }
  return 0;
}

void DaemonCluster::await_refusal(const std::string& by, const std::string& reason, std::uint64_t at_least) {
  EXPECT_GE(until(kSoon, [&] { return refused(by, reason) >= at_least; }), 0) << reason << ":\n"
                                                                              << at(by).epctl({"nodes"}).out;
}

Case DaemonCluster::spanning_case(std::uint32_t num_ranks) {
  Case c;
  c.num_ranks = num_ranks;
  c.num_experts = 4 * num_ranks;
  c.max_tokens = 16;
  c.hidden = 256;
  c.topk = 4;
  c.span = EPD_SPAN_CLUSTER;
  c.sum_ranks = 1;
  return c;
}

}  // namespace epd::test
