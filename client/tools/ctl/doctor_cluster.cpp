// epctl doctor: the cluster. Certificates as the daemon sees them, names and ports as they are seen from
// here.
#include "doctor.h"
#include "json.h"
#include "units.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace epd::ctl {
namespace {

constexpr int kConnectMs = 1'000;
constexpr std::int64_t kDaySeconds = 86'400;
constexpr std::int64_t kSoonDays = 30;
constexpr int kMaxPorts = 64;  // of a large cluster the first ones

Check ok(std::string name, std::string text) {
  return {Level::kOk, std::move(name), std::move(text), ""};
}
Check warn(std::string name, std::string text, std::string advice) {
  return {Level::kWarn, std::move(name), std::move(text), std::move(advice)};
}
Check fail(std::string name, std::string text, std::string advice) {
  return {Level::kFail, std::move(name), std::move(text), std::move(advice)};
}

// Empty: somebody takes connections there.
std::string connect_error(const addrinfo& address) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return std::strerror(errno);
  int error = ::connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd entry{fd, POLLOUT, 0};
    socklen_t size = sizeof(error);
    error = ETIMEDOUT;
    if (::poll(&entry, 1, kConnectMs) == 1) ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  ::close(fd);
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

Check judge_certificate(const v1::CertificateStatus& certificate) {
  const std::string name = "certificate";
  if (!certificate.error().empty()) {
    return fail(
        name, certificate.error() + "; the daemon uses the files that were good last",
        "put good files there, they are read again by themselves; without them epd does not start again");
  }
  std::string names;
  for (const std::string& one : certificate.names()) names += (names.empty() ? "" : ", ") + one;
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

// What to do if this node can't attach to the coordinator, by what gRPC and TLS say.
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

// What to do about a lost node. At its address there may be the same daemon with another name.
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

}  // namespace

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

}  // namespace epd::ctl
