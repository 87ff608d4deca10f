#include "kit/nodes.h"

#include "kit/command.h"
#include "kit/error.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <thread>

#include <nlohmann/json.hpp>

#include <unistd.h>

namespace epd::kit {
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

// Each of them sees all.
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
  // The coordinator last, so that the others can take their leave.
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
