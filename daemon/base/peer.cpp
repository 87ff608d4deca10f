#include "base/peer.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>
#include <utility>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; Debian 12's headers are older
#endif

namespace epd {
namespace {

Result<std::vector<std::uint32_t>> supplementary_groups(int socket) {
  static_assert(sizeof(gid_t) == sizeof(std::uint32_t));
  std::vector<std::uint32_t> groups(32);
  socklen_t bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  int outcome = ::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes);
  if (outcome != 0 && errno == ERANGE) {  // `bytes` says how many are needed
    groups.resize(bytes / sizeof(gid_t));
    outcome = ::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes);
  }
  if (outcome != 0) return errno_status("SO_PEERGROUPS");
  groups.resize(bytes / sizeof(gid_t));
  return groups;
}

std::string line_of(std::int32_t pid, const char* name) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/" + name);
  std::string line;
  std::getline(file, line);
  for (char& c : line) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return line;
}

}  // namespace

bool is_privileged(std::uint32_t uid) {
  static const uid_t own = ::geteuid();  // the daemon never changes it
  return uid == 0 || uid == own;
}

Result<PeerIdentity> peer_identity(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    return errno_status("SO_PEERCRED");
  PeerIdentity peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.gid = credentials.gid;
  Result<std::vector<std::uint32_t>> groups = supplementary_groups(socket);
  if (!groups.ok()) return groups.status();
  peer.gids = std::move(*groups);
  peer.gids.insert(peer.gids.begin(), peer.gid);
  int pidfd = -1;
  length = sizeof(pidfd);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0) {
    peer.pidfd.reset(pidfd);
    ::fcntl(pidfd, F_SETFD, FD_CLOEXEC);
  } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
    return errno_status("SO_PEERPIDFD of process " + std::to_string(peer.pid));
  } else if (errno != ENOPROTOOPT) {
    peer.pid = 0;  // the number may belong to another process by now
    peer.has_been_reaped = true;
  } else if (peer.pid > 0) {  // an older kernel: the peer has just connected, so the number is still its own
    peer.pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
  }
  return peer;
}

void name_program(PeerIdentity& peer) {
  if (!peer.pidfd.valid()) return;
  std::string program = line_of(peer.pid, "comm");
  std::string cgroup = line_of(peer.pid, "cgroup");  // "0::/path"; "12:pids:/path" before version 2
  // Its number may be another process's by now.
  if (::syscall(SYS_pidfd_send_signal, peer.pidfd.get(), 0, nullptr, 0) != 0 && errno == ESRCH) return;
  peer.program = std::move(program);
  peer.cgroup = cgroup.substr(std::min(cgroup.find('/'), cgroup.size()));
}

}  // namespace epd
