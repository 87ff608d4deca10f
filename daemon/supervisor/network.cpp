#include "network.h"

#include "base/log.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cstring>
#include <memory>
#include <string>

#include "common/fd.h"

namespace epd::supervisor {
namespace {

// The addresses alone, whatever the ports.
bool same_address(const sockaddr& a, const sockaddr& b) {
  if (a.sa_family != b.sa_family) return false;
  if (a.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return a.sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

// Which has the address; "": none of this machine.
std::string interface_of(const sockaddr& address) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, ::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr != nullptr && same_address(*entry->ifa_addr, address)) return entry->ifa_name;
  }
  return "";
}

// By which this machine sends to it. A connected socket of datagrams says so, and sends nothing.
std::string interface_to(const addrinfo& target) {
  const UniqueFd socket(::socket(target.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (!socket.valid() || ::connect(socket.get(), target.ai_addr, target.ai_addrlen) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0)
    return "";
  return interface_of(reinterpret_cast<const sockaddr&>(own));
}

// "HOST:PORT", "[HOST]:PORT"
std::string host_of(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (host.size() >= 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return host;
}

// A name of this machine may stand for a loopback address (Debian's /etc/hosts), by which nobody else reaches
// it.
bool is_loopback(const addrinfo& target) {
  if (target.ai_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(target.ai_addr)->sin6_addr) != 0;
  const auto* address = reinterpret_cast<const sockaddr_in*>(target.ai_addr);
  return ntohl(address->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

std::string interface_to(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const bool is_name = ::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0;
  if (!is_name) ::freeaddrinfo(found);
  hints.ai_flags = 0;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(found, ::freeaddrinfo);
  for (const addrinfo* target = found; target != nullptr; target = target->ai_next) {
    if (is_name && is_loopback(*target)) continue;
    if (std::string name = interface_to(*target); !name.empty()) return name;
  }
  return "";
}

}  // namespace

transport::NetworkOptions network_options(const Config& config) {
  if (!config.cluster) return {};
  transport::NetworkOptions options{config.network_library,        config.network_devices,
                                    config.network_transports,     config.network_batch_bytes,
                                    config.network_window_bytes,   config.effective_network_bytes(),
                                    config.network_peer_timeout_ms};
  if (options.devices != "auto") return options;
  options.devices = interface_to(host_of(config.cluster->coordinator));
  if (!options.devices.empty()) return options;
  options.devices = "all";
  log_event(LogLevel::kWarning, "no network interface leads to the coordinator; engines use all",
            {{"coordinator", config.cluster->coordinator}, {"allowed", "network.devices, as \"eth0\""}});
  return options;
}

}  // namespace epd::supervisor
