// Names of nodes, and addresses as the configuration and other daemons write them.
#pragma once

#include "common/status.h"

#include <sys/socket.h>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace epd::cluster {

struct HostPort {
  std::string host;  // a name, or a numeric address as inet_ntop writes it (without brackets)
  std::uint16_t port = 0;
};
// "node-a:7410", "10.0.0.1:7410", "[::1]:7410". The host is written in one form, whatever its spelling:
// "[0::1]:7410" has the host "::1", "[::ffff:10.0.0.1]:7410" has "10.0.0.1". So hosts can be compared as
// text.
std::optional<HostPort> parse_host_port(std::string_view text);
// "which ...": why it is no value of parse_host_port(); "" if no special reason is known.
std::string why_no_host_port(std::string_view text);
// "which ...": why no socket of a node can have the numeric address; "" if it can, or if the host is a name.
std::string why_of_no_node(const std::string& host);
std::string to_string(const HostPort& address);

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
};
// No value if the host is a name: names are not resolved.
std::optional<SocketAddress> numeric_address(const HostPort& address);
// "10.0.0.1:7410", "[::1]:7410"; an IPv4 address within IPv6 as IPv4.
std::string to_string(const SocketAddress& address);
// Turns a peer as gRPC writes it, "ipv4:10.0.0.1:7410" or "ipv6:%5B::1%5D:7410", into the form of
// to_string().
std::string peer_text(const std::string& grpc_peer);

// A numeric loopback address, or "localhost".
bool is_loopback(const std::string& host);
// Whether an interface of this machine has the address.
bool is_own_address(const std::string& host);
bool is_wildcard(const std::string& host);  // all addresses of the machine; of a HostPort

// 1..253 letters, digits, '-', '_', '.'; of a cluster and of a node.
bool is_name(std::string_view text);
constexpr const char* kAllowedNames = "1..253 letters, digits, '-', '_', '.'";
// "a, b, c"; "none" if there is none.
std::string listed(const std::vector<std::string>& names);
// Compares without regard to case, as DNS does.
bool same_name(std::string_view a, std::string_view b);
// The same for a pattern in which '*' stands for any characters.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace epd::cluster
