#include "cluster/address.h"

#include "common/fd.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <utility>

namespace epd::cluster {
namespace {

constexpr std::size_t kMaxName = 253;

char lower(char c) {
  return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
}

bool is_ipv6(const std::string& host) {
  return host.find(':') != std::string::npos;
}

std::string written(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  ::inet_ntop(family, address, text, sizeof(text));
  return text;
}

// Returns the form that inet_ntop writes, an IPv4 address within IPv6 as IPv4. No value if it is no numeric
// address.
std::optional<std::string> canonical(const std::string& host) {
  in6_addr bytes{};
  if (::inet_pton(AF_INET, host.c_str(), &bytes) == 1) return written(AF_INET, &bytes);
  if (::inet_pton(AF_INET6, host.c_str(), &bytes) != 1) return std::nullopt;
  return IN6_IS_ADDR_V4MAPPED(&bytes) ? written(AF_INET, &bytes.s6_addr[12]) : written(AF_INET6, &bytes);
}

bool is_number(std::string_view label) {
  const bool is_hex = label.starts_with("0x") || label.starts_with("0X");
  if (is_hex) label.remove_prefix(2);
  return std::all_of(label.begin(), label.end(),
                     [&](unsigned char c) { return is_hex ? std::isxdigit(c) != 0 : std::isdigit(c) != 0; });
}

// Whether all labels are numbers. Some resolvers take such names for IPv4 addresses ("10.1" for 10.0.0.1).
bool looks_numeric(std::string_view host) {
  if (host.ends_with('.')) host.remove_suffix(1);
  for (;;) {
    const std::size_t dot = host.find('.');
    if (!is_number(host.substr(0, dot))) return false;
    if (dot == std::string_view::npos) return true;
    host.remove_prefix(dot + 1);
  }
}

std::optional<std::uint16_t> parse_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  const bool ok = error == std::errc() && end == text.data() + text.size() && text.front() != '0';
  return ok ? std::optional(port) : std::nullopt;
}

void replace(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

}  // namespace

std::optional<HostPort> parse_host_port(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::optional<std::uint16_t> port = parse_port(text.substr(colon + 1));
  if (!port) return std::nullopt;
  std::string host(text.substr(0, colon));
  const bool has_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (has_brackets) host = host.substr(1, host.size() - 2);
  if (has_brackets != is_ipv6(host)) return std::nullopt;
  if (std::optional<std::string> numeric = canonical(host)) return HostPort{std::move(*numeric), *port};
  if (has_brackets || !is_name(host) || looks_numeric(host)) return std::nullopt;
  return HostPort{std::move(host), *port};
}

std::string why_no_host_port(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return text.empty() ? "" : "which has no port";
  std::string_view host = text.substr(0, colon);
  if (host.find('%') != std::string_view::npos) return "whose scope (%) means something on one machine only";
  if (!parse_port(text.substr(colon + 1))) return "whose port is no number 1..65535 without leading zeros";
  if (is_name(host) && looks_numeric(host) && !canonical(std::string(host)))
    return "which looks like an IPv4 address and is none";
  return "";
}

std::string why_of_no_node(const std::string& host) {
  const std::optional<SocketAddress> address = numeric_address({host, 1});
  if (!address) return "";
  if (address->bytes.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address->bytes);
    const std::uint32_t number = ntohl(v4->sin_addr.s_addr);
    if (number == INADDR_BROADCAST) return "which is the address of all machines of a network";
    if (IN_MULTICAST(number)) return "which is a multicast address";
    return number >> 24 == 0 && number != INADDR_ANY ? "which is in 0.0.0.0/8, of which no machine is" : "";
  }
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(&address->bytes)->sin6_addr;
  if (IN6_IS_ADDR_MULTICAST(&v6)) return "which is a multicast address";
  if (IN6_IS_ADDR_LINKLOCAL(&v6))
    return "which is a link-local address (fe80::/10): it needs a scope, which differs between machines";
  return "";
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
  if (address.bytes.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.bytes);
    return to_string(HostPort{written(AF_INET, &v4->sin_addr), ntohs(v4->sin_port)});
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.bytes);
  const bool is_ipv4 = IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr);
  return to_string(
      HostPort{is_ipv4 ? written(AF_INET, &v6->sin6_addr.s6_addr[12]) : written(AF_INET6, &v6->sin6_addr),
               ntohs(v6->sin6_port)});
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

// A socket can be bound only to such addresses.
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

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
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
