#include "connections.h"

#include "base/event.h"
#include "base/peer.h"
#include "base/socket_use.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace epd::control {

// ---- callers

namespace {

// A number that no other open socket has; 0: no descriptor is open there.
ino_t socket_at(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

Status Callers::add(int fd, supervisor::Operator client) {
  const std::lock_guard lock(mutex_);
  std::erase_if(clients_, [](const auto& entry) { return socket_at(entry.first) != entry.second.socket; });
  const std::size_t allowed = is_privileged(client.uid) ? 2 * kMaxConnections : kMaxConnections;
  if (clients_.size() >= allowed) {
    return resource_exhausted("there are " + std::to_string(clients_.size()) +
                              " control connections; allowed: " + std::to_string(allowed));
  }
  clients_[fd] = {socket_at(fd), std::move(client)};
  return {};
}

Result<supervisor::Operator> Callers::caller_of(const grpc::ServerContext& context) const {
  const std::string peer = context.peer();
  constexpr std::string_view kPrefix = "fd:";
  int fd = -1;
  const char* end = peer.data() + peer.size();
  const char* begin = peer.starts_with(kPrefix) ? peer.data() + kPrefix.size() : end;
  const auto [rest, error] = std::from_chars(begin, end, fd);
  if (error != std::errc() || rest != end)
    return internal_error("gRPC calls its peer \"" + peer + "\"; expected: fd:NUMBER");
  const std::lock_guard lock(mutex_);
  const auto found = clients_.find(fd);
  if (found == clients_.end()) return Status(StatusCode::kAborted, "the caller's connection has ended");
  supervisor::Operator who = found->second.who;
  who.has_gone = [&context] { return context.IsCancelled(); };
  return who;
}

// ---- socket

namespace {

constexpr std::size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;
constexpr std::string_view kPathCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+=@~,";
constexpr int kBacklog = 64;

std::string octal(mode_t mode) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "0%o", static_cast<unsigned>(mode));
  return text.data();
}

Status denied(const std::string& what) {
  return {StatusCode::kPermissionDenied, what + ": " + std::strerror(errno)};
}

}  // namespace

Status check_socket_options(const ControlOptions& options) {
  const std::string& path = options.socket_path;
  if (path.empty() || path.size() > kMaxPath) {
    return invalid_argument("control socket path '" + path + "' has " + std::to_string(path.size()) +
                            " characters; allowed: 1.." + std::to_string(kMaxPath));
  }
  const std::size_t odd = path.find_first_not_of(kPathCharacters);
  if (odd != std::string::npos) {
    return invalid_argument("control socket path '" + path + "' has an odd character at position " +
                            std::to_string(odd) + "; allowed: letters, digits and /._-+=@~,");
  }
  if ((options.mode & ~mode_t{0777}) != 0) {
    return invalid_argument("control socket mode is " + octal(options.mode) + "; allowed: 0..0777");
  }
  return {};
}

Status clear_socket_path(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno != ENOENT && errno != ENOTDIR) return denied("control socket " + path);
    return make_socket_directory(path, "daemon.control_socket");
  }
  if (!S_ISSOCK(info.st_mode)) {
    return invalid_argument("control socket " + path +
                            ": a file of another kind is there; allowed: a free path or an unused socket");
  }
  const SocketUse use = socket_use(path);
  if (use == SocketUse::kSomebody) {
    return {StatusCode::kAborted, "control socket " + path +
                                      ": another process listens there; stop it first " +
                                      "or choose another path"};
  }
  if (use == SocketUse::kUnknown) {
    return denied("control socket " + path +
                  ": can't tell whether somebody listens (another daemon.control_socket can be named)");
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return denied("can't remove the stale socket " + path);
  return {};
}

Result<UniqueFd> listen_on(const ControlOptions& options) {
  const std::string& path = options.socket_path;
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return errno_status("socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ::fchmod(socket.get(), 0600);  // the file gets this mode
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return denied("can't bind the control socket " + path);
  if (options.group && ::chown(path.c_str(), static_cast<uid_t>(-1), *options.group) != 0) {
    return denied("can't give the control socket " + path + " to group " + std::to_string(*options.group) +
                  " (run as root or as a member of the group)");
  }
  if (::chmod(path.c_str(), options.mode) != 0)
    return denied("can't set mode " + octal(options.mode) + " on the control socket " + path);
  if (::listen(socket.get(), kBacklog) != 0) return denied("can't listen on the control socket " + path);
  return socket;
}

// ---- acceptor

namespace {

constexpr std::chrono::milliseconds kPause(200);  // after an error that only time can mend

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::start(UniqueFd listener, std::string path, Callers& callers,
                                                  Take take) {
  Result<UniqueFd> wake = make_eventfd();
  if (!wake.ok()) return wake.status();
  std::unique_ptr<Acceptor> acceptor(
      new Acceptor(std::move(listener), std::move(*wake), std::move(path), callers, std::move(take)));
  try {
    acceptor->thread_ = std::thread([raw = acceptor.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    return resource_exhausted(std::string("no thread for the control socket: ") + error.what());
  }
  return acceptor;
}

Acceptor::~Acceptor() {
  stop();
}

void Acceptor::stop() {
  if (!listener_.valid()) return;
  ring_eventfd(wake_.get());
  if (thread_.joinable()) thread_.join();
  listener_.reset();
  remove_file(path_, file_);
}

void Acceptor::run() {
  static LogLimiter limiter;
  for (;;) {
    pollfd entries[2] = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    if (::poll(entries, 2, -1) < 0 && errno != EINTR) std::this_thread::sleep_for(kPause);
    if (entries[0].revents != 0) return;
    if (entries[1].revents == 0) continue;
    UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (connection.valid()) {
      try {
        admit(std::move(connection));
      } catch (const std::exception& error) {
        limiter.log(LogLevel::kError, "control connection lost", {{"reason", error.what()}});
      }
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      limiter.log(LogLevel::kError, "control connection waits", {{"reason", std::strerror(errno)}});
      std::this_thread::sleep_for(kPause);
    }
  }
}

void Acceptor::admit(UniqueFd connection) {
  static LogLimiter limiter;
  Result<PeerIdentity> peer = peer_identity(connection.get());
  if (!peer.ok()) {
    limiter.log(LogLevel::kError, "control connection lost", {{"reason", peer.status().message()}});
    return;
  }
  const Status status = callers_.add(connection.get(), {peer->uid, peer->pid, peer->gids, {}});
  if (status.ok()) {
    take_(connection.release());
    return;
  }
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "control connection refused",
                 {{"by_uid", peer->uid}, {"by_pid", peer->pid}, {"reason", status.message()}}, peer->uid);
}

}  // namespace epd::control
