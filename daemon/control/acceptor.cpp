#include "acceptor.h"

#include "base/event.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

#ifndef SO_COOKIE
#define SO_COOKIE 57
#endif

namespace epd {
namespace {

constexpr std::chrono::milliseconds kPause(200);  // when the process has no descriptors left

// Another for each socket there ever is; 0 if the descriptor is none.
std::uint64_t cookie_of(int fd) {
  std::uint64_t cookie = 0;
  socklen_t length = sizeof(cookie);
  return ::getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0 ? cookie : 0;
}

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::start(UniqueFd listener, std::string path,
                                                  std::function<void(int)> take) {
  Result<UniqueFd> wake = make_eventfd();
  if (!wake.ok()) return wake.status();
  std::unique_ptr<Acceptor> acceptor(
      new Acceptor(std::move(listener), std::move(*wake), std::move(path), std::move(take)));
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
  ::unlink(path_.c_str());
}

void Acceptor::run() {
  pollfd entries[2] = {{listener_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  for (;;) {
    if (::poll(entries, 2, -1) < 0 && errno != EINTR) return;
    if (entries[1].revents != 0) return;
    if (entries[0].revents == 0) continue;
    try {
      accept_all();
    } catch (const std::exception& error) {
      log_event(LogLevel::kError, "control connection lost", {{"reason", error.what()}});
    }
  }
}

void Acceptor::accept_all() {
  for (;;) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      admit(std::move(socket));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      static LogLimiter limiter;
      limiter.log(LogLevel::kError, "cannot accept control connections, trying again",
                  {{"reason", errno_status("accept").message()}});
      pollfd wake{wake_.get(), POLLIN, 0};
      (void)::poll(&wake, 1, static_cast<int>(kPause.count()));
      return;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;
    }
  }
}

// gRPC does not tell when it closes one; the kernel does.
void Acceptor::forget_closed() {
  std::erase_if(connections_,
                [](const auto& entry) { return cookie_of(entry.first) != entry.second.cookie; });
}

void Acceptor::admit(UniqueFd socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return;
  forget_closed();
  const auto of_user = std::count_if(connections_.begin(), connections_.end(),
                                     [&](const auto& entry) { return entry.second.uid == peer.uid; });
  if (connections_.size() >= kMaxConnections || static_cast<std::size_t>(of_user) >= kMaxConnectionsPerUser) {
    static LogLimiter limiter;
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "control connection refused: too many",
                   {{"by_uid", peer.uid},
                    {"by_pid", peer.pid},
                    {"of_user", of_user},
                    {"connections", connections_.size()}},
                   peer.uid);
    return;
  }
  connections_[socket.get()] = {cookie_of(socket.get()), peer.uid};
  take_(socket.release());
}

}  // namespace epd
