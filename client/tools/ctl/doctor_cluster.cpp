// epctl doctor: the cluster, and the network between nodes as the engines see it.
#include "doctor.h"
#include "format.h"

#include <sstream>

namespace epd::ctl {
namespace {

constexpr std::int64_t kDaySeconds = 86'400;
constexpr std::int64_t kSoonDays = 30;

Check judge_certificate(const v1::CertificateStatus& certificate) {
  const std::string name = "certificate";
  if (!certificate.error().empty()) {
    return fail(name, certificate.error() + "; the daemon uses the last valid files",
                "put valid files there: they are read again by themselves, and without them epd does not "
                "start again");
  }
  std::string names;
  for (const std::string& one : certificate.names()) append(names, one);
  const std::int64_t days = certificate.seconds_left() / kDaySeconds;
  const std::string text =
      certificate.file() + " names " + names + "; it expires in " + std::to_string(days) + " days";
  if (days >= kSoonDays) return ok(name, text);
  return warn(name, text, "renew it: the files are read again when they change, connections stay");
}

Check judge_port(const PortFacts& port) {
  const std::string name = "port " + port.what;
  if (port.error.empty()) return ok(name, port.address + " takes connections");
  if (!port.resolved) {
    return fail(name, port.address + ": " + port.error,
                "put the name into DNS or /etc/hosts, or set cluster.advertise to an address");
  }
  return fail(name, port.address + ": " + port.error,
              "see whether epd runs there, cluster.listen and cluster.advertise, and the firewall");
}

// Advice when this node can't attach to the coordinator, chosen by the messages of gRPC and TLS.
const char* advice_of_detached(const std::string& problem) {
  if (problem.find("certificate verify failed") != std::string::npos)
    return "put the CA of the coordinator's certificate into cluster.tls_ca here; it may have expired, too";
  if (problem.find("Connection refused") != std::string::npos)
    return "see whether epd runs on the coordinator's node, cluster.coordinator, and the firewall";
  return "see the coordinator's log: it names whom it refuses, and why";
}

Check judge_place(const v1::ClusterStatus& cluster) {
  const std::string text =
      cluster.name() + ", this is " + cluster.node() +
      (cluster.coordinates() ? ", the coordinator" : "; coordinator at " + cluster.coordinator());
  if (!cluster.problem().empty()) {
    return fail("cluster",
                text + ": not attached for " + format_ms(cluster.problem_ms()) + ": " + cluster.problem(),
                advice_of_detached(cluster.problem()));
  }
  if (cluster.insecure()) {
    return warn("cluster", text + "; plain text, nobody is authenticated",
                "for tests only: remove cluster.insecure and give it certificates");
  }
  return ok("cluster", text);
}

// Advice about a lost node. The same daemon may be at its address with another name.
std::string advice_of_lost(const v1::Node& lost, const v1::ListNodesResponse& nodes) {
  for (const v1::Node& node : nodes.nodes()) {
    if (node.state() != v1::NODE_STATE_LOST && node.address() == lost.address())
      return "node " + node.name() + " is at its address now: if it was renamed, this name goes when the " +
             "coordinator is started again";
  }
  return "start epd there, or look at its log; it comes back by itself";
}

Check judge_node(const v1::Node& node, const v1::ListNodesResponse& nodes) {
  const std::string name = "node " + node.name();
  const std::string text = word(node.state()) + " for " + format_ms(node.since_ms()) +
                           (node.reason().empty() ? "" : ": " + node.reason());
  switch (node.state()) {
    case v1::NODE_STATE_UP: return ok(name, text);
    case v1::NODE_STATE_LOST: return warn(name, text, advice_of_lost(node, nodes));
    case v1::NODE_STATE_SILENT: return warn(name, text, "see whether its machine and network are well");
    case v1::NODE_STATE_DRAINING: return warn(name, text, "it exits soon: start it again");
    case v1::NODE_STATE_UNKNOWN: return warn(name, text, "see what keeps this node from the coordinator");
    default: return warn(name, text, "epctl does not know this state: compare with epctl version");
  }
}

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
    return fail(
        name, engine.problem(),
        "see network.library, network.devices and network.transports (epctl config), and the log of the "
        "daemon");
  }
  const std::string text = engine.carrier() + " of " + engine.library() + ", by " + engine.interfaces();
  std::string missing;
  for (const std::string& one : names_of(engine.interfaces())) {
    if (one != "all" && !interfaces.contains(one)) append(missing, one);
  }
  if (missing.empty()) return ok(name, text);
  return warn(name, text + "; this machine has no " + missing,
              "correct network.devices; epctl may be in another network namespace than the daemon");
}

Check judge_far(const v1::FarEngine& far) {
  const std::string name = "network " + far.device() + " " + far.node() + " " + far.far_device();
  if (far.state() != v1::FAR_ENGINE_STATE_CONNECTED) {
    const bool connecting = far.state() == v1::FAR_ENGINE_STATE_CONNECTING;
    return warn(name,
                std::string(connecting ? "not connected yet" : "down") +
                    (far.reason().empty() ? "" : ": " + far.reason()),
                "see epctl nodes, and whether firewalls let the engines' ports pass: UCX chooses them");
  }
  const std::string text =
      "connected" +
      (far.has_round_trip_us() ? ", round trip " + format_us(far.round_trip_us()) : std::string());
  if (far.carrier() == far.far_carrier()) return ok(name, text);
  return warn(name, far.carrier() + " here and " + far.far_carrier() + " there",
              "install the same UCX on all nodes: others are not tested together");
}

}  // namespace

std::vector<Check> judge_cluster(const ClusterFacts& facts) {
  const v1::ClusterStatus& cluster = facts.nodes.cluster();
  std::vector<Check> checks{judge_place(cluster)};
  if (facts.nodes.has_certificate()) checks.push_back(judge_certificate(facts.nodes.certificate()));
  for (const v1::Node& node : facts.nodes.nodes()) {
    if (!node.own()) checks.push_back(judge_node(node, facts.nodes));
  }
  for (const PortFacts& port : facts.ports) checks.push_back(judge_port(port));
  std::uint64_t refused = 0;
  for (const v1::RefusalCount& refusal : cluster.refusals()) refused += refusal.count();
  if (refused != 0) {
    checks.push_back(warn("refusals", std::to_string(refused) + " on this node's port since it started",
                          "epctl events says who and why"));
  }
  return checks;
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
