#include "session/listener.h"

#include "base/socket_use.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace epd::session {
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

Status lock_error(const char* what, const std::string& path) {
  if (errno != ENOSPC && errno != EDQUOT) return errno_status(what + path);
  return {StatusCode::kResourceExhausted, path + " can't be written: " + std::strerror(errno)};
}

constexpr std::size_t kOwnerBytes = 10;  // of the lock file: the pid, and spaces

std::string lock_path_of(const std::string& path) {
  return path + ".lock";
}

bool is_at(const UniqueFd& file, const std::string& path) {
  struct stat info {};
  return ::fstat(file.get(), &info) == 0 && file_at(path) == FileId(info.st_dev, info.st_ino);
}

Result<UniqueFd> open_lock(const std::string& path) {
  const std::string lock_path = lock_path_of(path);
  UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid() && (errno == EACCES || errno == EPERM || errno == EROFS)) {
    return Status(
        StatusCode::kPermissionDenied,
        lock_path + " can't be opened: " + std::strerror(errno) +
            (errno == EROFS ? "; use another daemon.socket"
                            : "; it is of a daemon of another user, or you may not write there: use another "
                              "daemon.socket"));
  }
  if (!lock.valid()) return lock_error("open ", lock_path);
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    char owner[kOwnerBytes + 1] = {};
    const long pid = ::pread(lock.get(), owner, kOwnerBytes, 0) > 0 ? std::strtol(owner, nullptr, 10) : 0;
    return resource_exhausted("another epd (pid " + (pid > 0 ? std::to_string(pid) : "unknown") +
                              ") serves " + path + "; stop it or use another daemon.socket");
  }
  return lock;
}

// A daemon that ends removes the lock's file before it releases the lock. So the lock counts only if its file
// is still at the path.
Result<UniqueFd> take_lock(const std::string& path) {
  Result<UniqueFd> lock = open_lock(path);
  while (lock.ok() && !is_at(*lock, lock_path_of(path))) lock = open_lock(path);
  return lock;
}

// For those who are refused.
Status write_owner(const UniqueFd& lock, const std::string& path) {
  // Always as long: to cut the file would wait for the disk, for seconds if that is busy.
  std::string owner = std::to_string(::getpid());
  owner.resize(kOwnerBytes, ' ');
  if (::pwrite(lock.get(), owner.data(), owner.size(), 0) < 0)
    return lock_error("write ", lock_path_of(path));
  return {};
}

// OK if nobody listens at the path, which is a socket. A lock that is free does not say so: only epd takes
// it.
Status check_unused(const std::string& path) {
  switch (socket_use(path)) {
    case SocketUse::kNobody: return {};
    case SocketUse::kSomebody:
      return resource_exhausted("another process listens at " + path +
                                "; stop it or use another daemon.socket");
    case SocketUse::kUnknown: break;
  }
  return {StatusCode::kPermissionDenied, path + ": can't tell whether somebody listens: " +
                                             std::strerror(errno) + "; use another daemon.socket"};
}

bool is_socket(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode);
}

Status set_permissions(const ListenerOptions& options) {
  if (options.group && ::chown(options.path.c_str(), static_cast<uid_t>(-1), *options.group) != 0)
    return errno_status("chown " + options.path + " to group " + std::to_string(*options.group));
  if (::chmod(options.path.c_str(), options.mode) != 0) return errno_status("chmod " + options.path);
  return {};
}

}  // namespace

Result<Listener> Listener::open(const ListenerOptions& options) {
  Result<sockaddr_un> address = socket_address(options.path);
  if (!address.ok()) return address.status();
  if (Status status = make_socket_directory(options.path, "daemon.socket"); !status.ok()) return status;
  // Before the lock, so that none is left beside what is none of ours.
  struct stat info {};
  if (::lstat(options.path.c_str(), &info) == 0 && !S_ISSOCK(info.st_mode))
    return invalid_argument(options.path + " exists and is not a socket; remove it or use another path");
  if (is_socket(options.path) && ::access(lock_path_of(options.path).c_str(), F_OK) != 0) {
    if (Status status = check_unused(options.path); !status.ok()) return status;
  }
  Result<UniqueFd> lock = take_lock(options.path);
  if (!lock.ok()) return lock.status();
  Listener listener;  // where this fails, it removes the lock's file
  listener.lock_ = std::move(*lock);
  listener.path_ = options.path;
  if (Status status = write_owner(listener.lock_, options.path); !status.ok()) return status;
  if (is_socket(options.path)) {
    if (Status status = check_unused(options.path); !status.ok()) return status;
    ::unlink(options.path.c_str());
  }
  listener.socket_ = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.socket_.valid()) return errno_status("socket");
  // No client may connect before the file has its mode.
  ::fchmod(listener.socket_.get(), 0600);
  if (::bind(listener.socket_.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(sockaddr_un)) != 0)
    return errno_status("bind " + options.path);
  listener.file_ = file_at(options.path);
  if (Status status = set_permissions(options); !status.ok()) return status;
  if (::listen(listener.socket_.get(), kBacklog) != 0) return errno_status("listen " + options.path);
  return listener;
}

Listener& Listener::operator=(Listener&& other) noexcept {
  if (this == &other) return *this;
  remove();
  socket_ = std::move(other.socket_);
  lock_ = std::move(other.lock_);
  path_ = std::move(other.path_);
  file_ = other.file_;
  return *this;
}

void Listener::remove() {
  if (path_.empty()) return;
  remove_file(path_, file_);
  if (is_at(lock_, lock_path_of(path_))) ::unlink(lock_path_of(path_).c_str());
  path_.clear();
  lock_.reset();
}

}  // namespace epd::session
