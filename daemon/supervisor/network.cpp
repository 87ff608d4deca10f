#include "network.h"

#include "cluster/address.h"
#include "common/fd.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace epd::supervisor {
namespace {

struct InterfaceAddress {
  std::string interface;
  bool has_label = false;
  bool of_loopback = false;
  sockaddr_storage address{};

  const sockaddr& get() const { return reinterpret_cast<const sockaddr&>(address); }
};

const in_addr& v4(const sockaddr& address) {
  return reinterpret_cast<const sockaddr_in&>(address).sin_addr;
}

const in6_addr& v6(const sockaddr& address) {
  return reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
}

// Compares the addresses without the ports.
bool same_address(const sockaddr& a, const sockaddr& b) {
  if (a.sa_family != b.sa_family) return false;
  if (a.sa_family == AF_INET) return v4(a).s_addr == v4(b).s_addr;
  return a.sa_family == AF_INET6 && std::memcmp(&v6(a), &v6(b), sizeof(in6_addr)) == 0;
}

std::string text_of(const sockaddr& address) {
  char text[INET6_ADDRSTRLEN] = "";
  const void* bytes = address.sa_family == AF_INET ? static_cast<const void*>(&v4(address)) : &v6(address);
  ::inet_ntop(address.sa_family, bytes, text, sizeof(text));
  return text;
}

// Addresses of all interfaces, in the kernel's order. None: `error` says why they can't be listed.
std::vector<InterfaceAddress> interface_addresses(std::string& error) {
  std::vector<InterfaceAddress> all;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    error = std::string("interfaces can't be listed: ") + std::strerror(errno);
    if (errno == EAFNOSUPPORT)
      error += " (that needs AF_NETLINK: see RestrictAddressFamilies of the service)";
    return all;
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, ::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const int family = entry->ifa_addr == nullptr ? AF_UNSPEC : entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress& one = all.emplace_back();
    one.interface = entry->ifa_name;
    if (const std::size_t colon = one.interface.find(':'); colon != std::string::npos) {
      one.interface.resize(colon);  // getifaddrs says the label of an alias in place of the name
      one.has_label = true;
    }
    one.of_loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    std::memcpy(&one.address, entry->ifa_addr,
                family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  }
  return all;
}

// The one by which UCX listens on the interface: its first, of IPv4 if there is one. UCX asks by the
// interface's name, which is not the name of an address with a label. "": it has none.
std::string address_of(const std::string& interface, const std::vector<InterfaceAddress>& all) {
  for (const int family : {AF_INET, AF_INET6}) {
    for (const InterfaceAddress& one : all) {
      const bool fits = one.interface == interface && !one.has_label && one.get().sa_family == family;
      if (fits && (family == AF_INET || IN6_IS_ADDR_LINKLOCAL(&v6(one.get())) == 0))
        return text_of(one.get());
    }
  }
  return "";
}

std::string host_of(const std::string& address) {
  return cluster::parse_host_port(address)->host;
}

NetworkChoice none(std::string problem) {
  return {"", {}, {}, std::move(problem)};
}

NetworkChoice choice_of(const std::string& devices, const std::vector<InterfaceAddress>& all) {
  NetworkChoice choice{devices, {}, {}, ""};
  std::istringstream list(devices);
  for (std::string name; std::getline(list, name, ',');) {
    if (std::string address = address_of(name, all); !address.empty())
      choice.addresses.push_back(std::move(address));
    for (const InterfaceAddress& one : all) {
      if (one.interface == name && !one.has_label) choice.held.push_back(text_of(one.get()));
    }
  }
  return choice;
}

// The interface with that address of this machine. No other machine can reach this one by a loopback
// interface, whatever addresses that has.
NetworkChoice interface_of(const sockaddr& address, bool loopback_allowed) {
  std::string problem = "no interface has the address " + text_of(address);
  const std::vector<InterfaceAddress> all = interface_addresses(problem);
  for (const InterfaceAddress& one : all) {
    if (!same_address(one.get(), address)) continue;
    if (one.of_loopback && !loopback_allowed)
      return none("the address " + text_of(address) + " is one of the loopback interface " + one.interface);
    NetworkChoice choice = choice_of(one.interface, all);
    if (!choice.addresses.empty()) return choice;
    problem = one.interface + " has no address by which UCX listens, as all have labels";
  }
  return none(std::move(problem));
}

// The interface by which this machine sends to the address. A connected datagram socket knows it, without
// sending.
NetworkChoice interface_to(const addrinfo& target, bool loopback_allowed) {
  const UniqueFd socket(::socket(target.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (!socket.valid() || ::connect(socket.get(), target.ai_addr, target.ai_addrlen) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0)
    return none("there is no route to " + text_of(*target.ai_addr));
  return interface_of(reinterpret_cast<const sockaddr&>(own), loopback_allowed);
}

using Found = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// Null: `error` says why.
Found resolve(const std::string& host, int& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  return {error == 0 ? found : nullptr, ::freeaddrinfo};
}

// A cluster of one machine names a loopback address. But a name of this machine may stand for one (Debian's
// /etc/hosts), by which no other machine reaches it.
NetworkChoice interface_to(const std::string& host) {
  int error = 0;
  const Found found = resolve(host, error);
  if (found == nullptr) return none("\"" + host + "\" can't be resolved: " + ::gai_strerror(error));
  NetworkChoice choice;
  for (const addrinfo* target = found.get(); target != nullptr; target = target->ai_next) {
    const bool loopback = cluster::is_loopback(text_of(*target->ai_addr));
    choice = loopback && !cluster::is_loopback(host)
                 ? none("\"" + host + "\" is " + text_of(*target->ai_addr) + " on this machine")
                 : interface_to(*target, loopback);
    if (!choice.devices.empty()) break;
  }
  return choice;
}

// The coordinator is this node: what it listens on says more than its name, which may be a loopback name
// here.
NetworkChoice own_interface(const cluster::Settings& settings) {
  const cluster::HostPort listen = *cluster::parse_host_port(settings.listen);
  const std::optional<cluster::SocketAddress> address = cluster::numeric_address(listen);
  if (!address || cluster::is_wildcard(listen.host)) return interface_to(host_of(settings.advertise));
  return interface_of(*address->get(), cluster::is_loopback(listen.host));
}

}  // namespace

bool lacks(const NetworkChoice& now, const NetworkChoice& known) {
  return (now.devices.empty() && !known.devices.empty()) || now.addresses.size() < known.addresses.size();
}

bool is_outdated(const NetworkChoice& given, const NetworkChoice& now) {
  if (now.devices.empty() || lacks(now, given)) return false;
  if (given.devices != now.devices) return true;
  if (given.addresses.size() < now.addresses.size()) return true;
  return !std::all_of(given.addresses.begin(), given.addresses.end(), [&](const std::string& address) {
    return std::find(now.held.begin(), now.held.end(), address) != now.held.end();
  });
}

std::string in_words(const NetworkChoice& choice) {
  if (choice.devices.empty()) return "none";
  std::string addresses;
  for (const std::string& address : choice.addresses) addresses += (addresses.empty() ? "" : ", ") + address;
  return choice.devices + (addresses.empty() ? "" : " (" + addresses + ")");
}

NetworkChoice choose_network(const cluster::Settings& settings, const std::string& devices) {
  std::string unlisted;  // then UCX knows the names alone
  if (devices != "auto") return choice_of(devices, interface_addresses(unlisted));
  NetworkChoice choice =
      settings.coordinates() ? own_interface(settings) : interface_to(host_of(settings.coordinator));
  if (choice.devices.empty()) {
    choice.problem = "no network interface for engines is known: cluster." +
                     std::string(settings.coordinates() ? "advertise" : "coordinator") + " is \"" +
                     (settings.coordinates() ? settings.advertise : settings.coordinator) + "\", and " +
                     choice.problem + "; set network.devices, as \"eth0\"";
  }
  return choice;
}

namespace {

// Whether each of these transports is of an RDMA card, which checks what it carries. Unknown ones count as
// others.
bool is_rdma(const std::string& transports) {
  constexpr std::string_view kRdma[] = {"ib",      "rc", "rc_v", "rc_x",   "rc_verbs",
                                        "rc_mlx5", "ud", "ud_v", "ud_x",   "ud_verbs",
                                        "ud_mlx5", "dc", "dc_x", "dc_mlx5"};
  std::istringstream words(transports);
  bool all = true;
  for (std::string word; all && std::getline(words, word, ',');)
    all = std::find(std::begin(kRdma), std::end(kRdma), word) != std::end(kRdma);
  return all;
}

abi::FarCheck check_of(const Config& config) {
  const abi::FarCheck check{config.network_check + static_cast<std::uint32_t>(abi::FarCheck::kHeaders)};
  return check == abi::FarCheck::kCrc && is_rdma(config.network_transports) ? abi::FarCheck::kHeaders : check;
}

}  // namespace

transport::NetworkOptions network_options(const Config& config, const NetworkChoice& choice) {
  if (!config.cluster || choice.devices.empty()) return {};
  return {config.network_library,         choice.devices,
          config.network_transports,      config.network_batch_bytes,
          config.network_window_bytes,    config.effective_network_bytes(),
          config.network_peer_timeout_ms, check_of(config)};
}

}  // namespace epd::supervisor
