// epctl doctor: the network between nodes, as the engines see it.
#include "doctor.h"
#include "units.h"

#include <filesystem>
#include <sstream>
#include <system_error>

namespace epd::ctl {
namespace {

// "eth0,mlx5_0:1": without ports.
std::vector<std::string> names_of(const std::string& interfaces) {
  std::vector<std::string> names;
  std::istringstream list(interfaces);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name.substr(0, name.find(':')));
  return names;
}

Check judge_engine(const v1::NetworkEngine& engine, const std::set<std::string>& interfaces) {
  const std::string name = "network " + engine.device();
  if (!engine.problem().empty()) {
    return {Level::kFail, name, engine.problem(),
            "see network.library, network.devices and network.transports (epctl config), and the log of the "
            "daemon"};
  }
  const std::string text = engine.carrier() + " of " + engine.library() + ", by " + engine.interfaces();
  std::string missing;
  for (const std::string& one : names_of(engine.interfaces())) {
    if (one != "all" && !interfaces.contains(one)) missing += (missing.empty() ? "" : ", ") + one;
  }
  if (missing.empty()) return {Level::kOk, name, text, ""};
  return {Level::kWarn, name, text + "; this machine has no " + missing,
          "correct network.devices; epctl may be in another network namespace than the daemon"};
}

Check judge_far(const v1::FarEngine& far) {
  const std::string name = "network " + far.device() + " " + far.node() + " " + far.far_device();
  if (far.state() != v1::FAR_ENGINE_STATE_CONNECTED) {
    const bool connecting = far.state() == v1::FAR_ENGINE_STATE_CONNECTING;
    return {Level::kWarn, name,
            std::string(connecting ? "not connected yet" : "down") +
                (far.reason().empty() ? "" : ": " + far.reason()),
            "see epctl nodes, and whether firewalls let the engines' ports pass: UCX chooses them"};
  }
  const std::string text =
      "connected" +
      (far.has_round_trip_us() ? ", round trip " + format_us(far.round_trip_us()) : std::string());
  if (far.carrier() == far.far_carrier()) return {Level::kOk, name, text, ""};
  return {Level::kWarn, name, far.carrier() + " here and " + far.far_carrier() + " there",
          "install the same UCX on all nodes: others are not tested together"};
}

}  // namespace

std::set<std::string> probe_interfaces() {
  std::set<std::string> names;
  for (const char* directory : {"/sys/class/net", "/sys/class/infiniband"}) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(directory, error))
      names.insert(entry.path().filename());
  }
  return names;
}

std::vector<Check> judge_network(const ClusterFacts& facts) {
  std::vector<Check> checks;
  for (const v1::NetworkEngine& engine : facts.network.engines()) {
    const bool serves = engine.device().starts_with("host:") && engine.state() == v1::DEVICE_STATE_READY;
    if (serves) checks.push_back(judge_engine(engine, facts.interfaces));
  }
  for (const v1::FarEngine& far : facts.network.far_engines()) {
    if (far.state() != v1::FAR_ENGINE_STATE_IDLE) checks.push_back(judge_far(far));
  }
  return checks;
}

}  // namespace epd::ctl
