// Sockets of processes, as /proc shows them, and connections to them.
#pragma once

#include "common/fd.h"

#include <sys/types.h>
#include <cstdint>
#include <string>
#include <vector>

namespace epd::test {

struct NetworkSocket {
  std::string table;  // tcp, tcp6, udp, udp6
  std::uint16_t port = 0;
  bool listens = false;
};
// The sockets of the process's own network namespace; none for a process that has ended.
std::vector<NetworkSocket> network_sockets(pid_t pid);
// The first port on which the process listens by TCP; 0: none.
std::uint16_t listening_port(pid_t pid);

// To a port of 127.0.0.1, from that IPv4 address of this machine. Invalid: nobody listens.
UniqueFd tcp_connect(std::uint16_t port, const std::string& from = "127.0.0.1");

}  // namespace epd::test
