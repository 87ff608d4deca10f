#include "session/listener.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; Debian 12's headers are older
#endif

namespace epd {
namespace {

constexpr int kBacklog = 128;

Result<sockaddr_un> socket_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return invalid_argument("socket path \"" + path + "\" has " + std::to_string(path.size()) +
                            " characters; allowed: 1.." + std::to_string(sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Status make_directory(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  if (parent.empty()) return {};
  std::error_code error;
  std::filesystem::create_directories(parent, error);
  if (error) return internal_error("directory " + parent.string() + ": " + error.message());
  return {};
}

Result<UniqueFd> take_lock(const std::string& path) {
  const std::string lock_path = path + ".lock";
  UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return errno_status("open " + lock_path);
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    char owner[32] = {};
    const ssize_t n = ::pread(lock.get(), owner, sizeof(owner) - 1, 0);
    const std::string pid(owner, n > 0 ? static_cast<std::size_t>(n) : 0);
    return resource_exhausted("another epd (pid " + (pid.empty() ? "unknown" : pid) + ") serves " + path +
                              "; stop it or use another daemon.socket");
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(lock.get(), 0) != 0 || ::pwrite(lock.get(), pid.data(), pid.size(), 0) < 0)
    return errno_status("write " + lock_path);
  return lock;
}

Result<gid_t> group_id(const std::string& name) {
  std::vector<char> buffer(16384);
  group entry{};
  group* found = nullptr;
  ::getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found == nullptr)
    return invalid_argument("daemon.socket_group is \"" + name + "\"; allowed: a group of this system");
  return found->gr_gid;
}

Status set_permissions(const ListenerOptions& options) {
  if (!options.group.empty()) {
    Result<gid_t> gid = group_id(options.group);
    if (!gid.ok()) return gid.status();
    if (::chown(options.path.c_str(), static_cast<uid_t>(-1), *gid) != 0)
      return errno_status("chown " + options.path + " to group " + options.group);
  }
  if (::chmod(options.path.c_str(), options.mode) != 0) return errno_status("chmod " + options.path);
  return {};
}

}  // namespace

Result<Listener> Listener::open(const ListenerOptions& options) {
  Result<sockaddr_un> address = socket_address(options.path);
  if (!address.ok()) return address.status();
  if (Status status = make_directory(options.path); !status.ok()) return status;
  Result<UniqueFd> lock = take_lock(options.path);
  if (!lock.ok()) return lock.status();

  struct stat info {};
  if (::lstat(options.path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode))
      return invalid_argument(options.path + " exists and is not a socket; remove it or use another path");
    ::unlink(options.path.c_str());  // its daemon is dead: the lock was free
  }
  Listener listener;
  listener.lock_ = std::move(*lock);
  listener.socket_ = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.socket_.valid()) return errno_status("socket");
  // Nobody may connect before the mode is right.
  ::fchmod(listener.socket_.get(), 0600);
  if (::bind(listener.socket_.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(sockaddr_un)) != 0)
    return errno_status("bind " + options.path);
  listener.path_ = options.path;
  if (Status status = set_permissions(options); !status.ok()) return status;
  if (::listen(listener.socket_.get(), kBacklog) != 0) return errno_status("listen " + options.path);
  return listener;
}

Listener& Listener::operator=(Listener&& other) noexcept {
  if (this == &other) return *this;
  (void)close();
  socket_ = std::move(other.socket_);
  lock_ = std::move(other.lock_);
  path_ = std::move(other.path_);
  return *this;
}

UniqueFd Listener::close() {
  if (!socket_.valid()) return {};
  ::unlink(path_.c_str());
  lock_.reset();  // the lock file stays: removing it would race with the next daemon's open
  return std::move(socket_);
}

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

}  // namespace

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
  } else if (errno != ENOPROTOOPT) {
    // The process has ended and been reaped, or there is no descriptor left. Its number says nothing: it may
    // be a stranger's by now, whose end would be taken for this client's.
    return errno_status("SO_PEERPIDFD of process " + std::to_string(peer.pid));
  } else if (peer.pid > 0) {  // an older kernel: it has connected just now, so the number is still its own
    peer.pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
  }
  return peer;
}

}  // namespace epd
