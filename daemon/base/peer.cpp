#include "base/peer.h"

#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; Debian 12's headers are older
#endif

namespace epd {

// ---- peer

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

// ---- account

namespace {

constexpr std::size_t kMaxRecord = std::size_t{1} << 20;

std::optional<std::uint32_t> number(const std::string& text) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value > kMaxAccountId)
    return std::nullopt;
  return value;
}

// `ask(buffer)` is getpwnam_r or getgrnam_r. A group of many members needs a large buffer.
template <typename Ask>
void with_buffer(const Ask& ask) {
  std::vector<char> buffer(4096);
  while (ask(buffer) == ERANGE && buffer.size() < kMaxRecord) buffer.resize(buffer.size() * 2);
}

}  // namespace

std::optional<std::uint32_t> find_user_id(const std::string& name_or_number) {
  passwd record{};
  passwd* found = nullptr;
  with_buffer([&](std::vector<char>& buffer) {
    return ::getpwnam_r(name_or_number.c_str(), &record, buffer.data(), buffer.size(), &found);
  });
  return found != nullptr ? std::optional<std::uint32_t>(found->pw_uid) : number(name_or_number);
}

std::optional<std::uint32_t> find_group_id(const std::string& name_or_number) {
  group record{};
  group* found = nullptr;
  with_buffer([&](std::vector<char>& buffer) {
    return ::getgrnam_r(name_or_number.c_str(), &record, buffer.data(), buffer.size(), &found);
  });
  return found != nullptr ? std::optional<std::uint32_t>(found->gr_gid) : number(name_or_number);
}

}  // namespace epd
