#include "sockets.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

std::set<std::string> socket_inodes(pid_t pid) {
  std::set<std::string> inodes;
  std::error_code ended;
  for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ended)) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry.path(), gone);
    if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
  }
  return inodes;
}

}  // namespace

std::vector<NetworkSocket> network_sockets(pid_t pid) {
  const std::set<std::string> own = socket_inodes(pid);
  std::vector<NetworkSocket> found;
  for (const char* table : {"tcp", "tcp6", "udp", "udp6"}) {
    std::ifstream lines("/proc/" + std::to_string(pid) + "/net/" + table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state, skipped, inode;
      words >> number >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) words >> skipped;
      words >> inode;
      if (!own.contains(inode)) continue;
      const auto port =
          static_cast<std::uint16_t>(std::stoul(local.substr(local.find(':') + 1), nullptr, 16));
      found.push_back({table, port, state == "0A"});
    }
  }
  return found;
}

std::uint16_t listening_port(pid_t pid) {
  for (const NetworkSocket& socket : network_sockets(pid)) {
    if (socket.listens) return socket.port;
  }
  return 0;
}

UniqueFd tcp_connect(std::uint16_t port, const std::string& from) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in own{};
  own.sin_family = AF_INET;
  ::inet_pton(AF_INET, from.c_str(), &own.sin_addr);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool connected = ::bind(fd.get(), reinterpret_cast<sockaddr*>(&own), sizeof(own)) == 0 &&
                         ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  if (!connected) fd.reset();
  return fd;
}

}  // namespace epd::test
