#include "address.h"

#include "common/fd.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstring>

namespace epd::cluster {
namespace {

constexpr std::size_t kMaxName = 253;

char lower(char c) {
  return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
}

bool is_ipv6(const std::string& host) {
  return host.find(':') != std::string::npos;
}

void replace(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

}  // namespace

std::optional<HostPort> parse_host_port(std::string_view text) {
  HostPort address;
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error != std::errc() || end != port.data() + port.size() || address.port == 0) return std::nullopt;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    address.host = host.substr(1, host.size() - 2);
    if (!is_ipv6(address.host) || !numeric_address(address)) return std::nullopt;
    return address;
  }
  address.host = host;
  return is_name(host) ? std::optional(address) : std::nullopt;
}

std::string to_string(const HostPort& address) {
  return (is_ipv6(address.host) ? "[" + address.host + "]" : address.host) + ":" +
         std::to_string(address.port);
}

std::optional<SocketAddress> numeric_address(const HostPort& address) {
  SocketAddress result;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&result.bytes);
  if (::inet_pton(AF_INET, address.host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(address.port);
    result.size = sizeof(*v4);
    return result;
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&result.bytes);
  if (::inet_pton(AF_INET6, address.host.c_str(), &v6->sin6_addr) != 1) return std::nullopt;
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(address.port);
  result.size = sizeof(*v6);
  return result;
}

std::string to_string(const SocketAddress& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.bytes.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.bytes);
    ::inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
    return to_string(HostPort{text, ntohs(v4->sin_port)});
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.bytes);
  if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
    ::inet_ntop(AF_INET, &v6->sin6_addr.s6_addr[12], text, sizeof(text));
  } else {
    ::inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text));
  }
  return to_string(HostPort{text, ntohs(v6->sin6_port)});
}

std::string peer_text(const std::string& grpc_peer) {
  std::string text = grpc_peer.substr(grpc_peer.find(':') + 1);
  replace(text, "%5B", "[");
  replace(text, "%5D", "]");
  return text;
}

bool is_loopback(const std::string& host) {
  if (same_name(host, "localhost")) return true;
  const std::optional<SocketAddress> address = numeric_address({host, 1});
  if (!address) return false;
  if (address->bytes.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address->bytes);
    return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address->bytes);
  return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

// A socket can be bound to such ones only.
bool is_own_address(const std::string& host) {
  std::optional<SocketAddress> address = numeric_address({host, 1});
  if (!address || is_wildcard(host)) return false;
  auto& port = address->bytes.ss_family == AF_INET
                   ? reinterpret_cast<sockaddr_in&>(address->bytes).sin_port
                   : reinterpret_cast<sockaddr_in6&>(address->bytes).sin6_port;
  port = 0;  // any that is free
  const UniqueFd fd(::socket(address->bytes.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return fd.valid() &&
         ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address->bytes), address->size) == 0;
}

bool is_wildcard(const std::string& host) {
  return host == "0.0.0.0" || host == "::";
}

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= kMaxName && std::all_of(text.begin(), text.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
  });
}

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return lower(x) == lower(y); });
}

// Goes back to the last '*' where the rest does not fit: at most pattern times name steps.
bool matches(std::string_view pattern, std::string_view name) {
  std::size_t p = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;
  std::size_t covered = 0;  // characters of the name before `n` when the last '*' began
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      covered = n;
    } else if (p < pattern.size() && lower(pattern[p]) == lower(name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++covered;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace epd::cluster
