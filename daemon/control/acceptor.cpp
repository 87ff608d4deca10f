#include "acceptor.h"

#include "base/event.h"
#include "base/peer.h"

#include <poll.h>
#include <sys/socket.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

namespace epd::control {
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
