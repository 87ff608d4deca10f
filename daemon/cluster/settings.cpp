#include "cluster/settings.h"

#include "cluster/address.h"

#include <limits.h>
#include <unistd.h>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <system_error>
#include <utility>

namespace epd::cluster {
namespace {

constexpr const char* kAllowedAddress = "HOST:PORT, as node-a:7410, 10.0.0.1:7410 or [::1]:7410";
constexpr const char* kAllowedListen =
    "a numeric address and a port, as 0.0.0.0:7410, 10.0.0.1:7410 or [::]:7410";

Status refused(const char* key, const std::string& value, const std::string& allowed) {
  return invalid_argument(std::string(key) + " is \"" + value + "\"; allowed: " + allowed);
}

// Reads the address and writes `value` in the form in which addresses are compared.
Result<HostPort> read_address(const char* key, std::string& value, const std::string& allowed) {
  std::optional<HostPort> address = parse_host_port(value);
  const std::string why = address ? why_of_no_node(address->host) : why_no_host_port(value);
  if (!address || !why.empty()) {
    return invalid_argument(std::string(key) + " is \"" + value + "\"" + (why.empty() ? "" : ", " + why) +
                            "; allowed: " + allowed);
  }
  value = to_string(*address);
  return std::move(*address);
}

// For the address of a node that others connect to.
Status complete_address(const char* key, std::string& value) {
  const std::string given = value;
  Result<HostPort> address = read_address(key, value, kAllowedAddress);
  if (!address.ok()) return address.status();
  return is_wildcard(address->host) ? refused(key, given, kAllowedAddress) : Status();
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = "";
  return ::gethostname(name, sizeof(name)) == 0 ? name : "";
}

Status fill_in(Settings& settings) {
  if (!is_name(settings.name)) return refused("cluster.name", settings.name, kAllowedNames);
  if (settings.node.empty()) settings.node = host_name();
  if (!is_name(settings.node)) return refused("cluster.node", settings.node, kAllowedNames);
  for (char& c : settings.node) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const std::string given = settings.listen;
  Result<HostPort> listen = read_address("cluster.listen", settings.listen, kAllowedListen);
  if (!listen.ok()) return listen.status();
  if (!numeric_address(*listen)) return refused("cluster.listen", given, kAllowedListen);
  if (settings.advertise.empty()) settings.advertise = to_string(HostPort{settings.node, listen->port});
  if (Status status = complete_address("cluster.advertise", settings.advertise); !status.ok()) return status;
  return complete_address("cluster.coordinator", settings.coordinator);
}

// Whether `address` names what this node listens on.
bool is_own(const HostPort& address, const Settings& settings) {
  const HostPort listen = *parse_host_port(settings.listen);
  if (address.port != listen.port) return false;
  if (same_name(address.host, settings.node) || same_name(address.host, listen.host)) return true;
  return is_wildcard(listen.host) && is_own_address(address.host);
}

Status check_coordinator(const Settings& settings) {
  if (settings.coordinates()) return {};
  const HostPort coordinator = *parse_host_port(settings.coordinator);
  if (is_own(coordinator, settings)) {
    return invalid_argument("cluster.advertise is \"" + settings.advertise +
                            "\", and cluster.coordinator is \"" + settings.coordinator +
                            "\", which is this node too; allowed: cluster.advertise = \"" +
                            settings.coordinator +
                            "\" if this node is to coordinate, else the address of another "
                            "node as cluster.coordinator");
  }
  if (same_name(coordinator.host, settings.node)) {
    return refused("cluster.coordinator", settings.coordinator,
                   "cluster.advertise = \"" + settings.advertise +
                       "\" if this node is to coordinate, else the address of another node");
  }
  return {};
}

Status check_names(const Settings& settings) {
  for (const std::string& pattern : settings.nodes) {
    std::string name = pattern;
    std::replace(name.begin(), name.end(), '*', 'x');
    if (!is_name(name)) {
      return refused("cluster.nodes", pattern,
                     std::string("names of nodes, in which '*' stands for any characters: ") + kAllowedNames);
    }
  }
  if (settings.allows(settings.node)) return {};
  return refused("cluster.nodes", listed(settings.nodes),
                 "a list that allows this node too, cluster.node = \"" + settings.node + "\"");
}

struct UserRule {
  std::string nodes;  // a pattern
  std::uint32_t first = 0;
  std::uint32_t last = 0;
};

std::optional<UserRule> parse_user_rule(const std::string& text) {
  const std::size_t sign = text.find('=');
  if (sign == std::string::npos) return std::nullopt;
  UserRule rule{text.substr(0, sign), 0, 0};
  std::string name = rule.nodes;
  std::replace(name.begin(), name.end(), '*', 'x');
  const char* end = text.data() + text.size();
  std::from_chars_result read = std::from_chars(text.data() + sign + 1, end, rule.first);
  if (read.ec != std::errc() || !is_name(name)) return std::nullopt;
  rule.last = rule.first;
  if (read.ptr != end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, rule.last);
  const bool whole = read.ptr == end && read.ec == std::errc();
  return whole && rule.first <= rule.last ? std::optional(rule) : std::nullopt;
}

Status check_users(const Settings& settings) {
  for (const std::string& text : settings.users) {
    if (!parse_user_rule(text))
      return refused("cluster.users", text, "PATTERN=UID or PATTERN=FIRST-LAST, as node-*=1000-59999");
  }
  return {};
}

Status check_insecure(const Settings& settings) {
  if (!settings.tls_ca.empty() || !settings.tls_cert.empty() || !settings.tls_key.empty())
    return invalid_argument(
        "cluster.insecure is \"true\"; allowed: only without cluster.tls_ca, tls_cert, tls_key");
  for (const auto& [key, value] : {std::pair("cluster.listen", &settings.listen),
                                   std::pair("cluster.coordinator", &settings.coordinator)}) {
    if (!is_loopback(parse_host_port(*value)->host)) {
      return refused(
          key, *value,
          "with cluster.insecure a loopback address, as 127.0.0.1:7410, because nothing is encrypted");
    }
  }
  return {};
}

}  // namespace

bool Settings::coordinates() const {
  return same_name(coordinator, advertise);
}

bool Settings::allows(const std::string& other) const {
  return nodes.empty() || std::any_of(nodes.begin(), nodes.end(),
                                      [&](const std::string& pattern) { return matches(pattern, other); });
}

Status Settings::check_user(const std::string& other, std::uint32_t uid) const {
  if (users.empty()) return {};
  for (const std::string& text : users) {
    const std::optional<UserRule> rule = parse_user_rule(text);
    if (rule && matches(rule->nodes, other) && rule->first <= uid && uid <= rule->last) return {};
  }
  return {StatusCode::kPermissionDenied, "node " + other + " may not speak for user " + std::to_string(uid) +
                                             "; cluster.users of the coordinator is " + listed(users)};
}

Result<Settings> complete(Settings settings) {
  if (Status status = fill_in(settings); !status.ok()) return status;
  if (Status status = check_coordinator(settings); !status.ok()) return status;
  if (Status status = check_names(settings); !status.ok()) return status;
  if (Status status = check_users(settings); !status.ok()) return status;
  if (settings.node_timeout_ms < 3 * settings.heartbeat_ms) {
    return invalid_argument(
        "cluster.node_timeout_ms is \"" + std::to_string(settings.node_timeout_ms) +
        "\"; allowed: at least three times cluster.heartbeat_ms = " + std::to_string(settings.heartbeat_ms));
  }
  const Status status = settings.insecure ? check_insecure(settings) : check_certificates(settings);
  if (!status.ok()) return status;
  return settings;
}

}  // namespace epd::cluster
