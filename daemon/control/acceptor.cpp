#include "acceptor.h"

#include "base/clock.h"
#include "base/event.h"
#include "base/peer.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

namespace epd {
namespace {

constexpr int kRefillMs = 20;
constexpr int kPauseMs = 200;  // when the process has no descriptors left

pollfd entry_of(int fd, short events) {
  return {events != 0 ? fd : -1, events,
          0};  // not polled: else a hang-up that nobody reads would wake for ever
}

Result<std::pair<UniqueFd, UniqueFd>> stream_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    return errno_status("socketpair");
  return std::pair(UniqueFd(ends[0]), UniqueFd(ends[1]));
}

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::start(UniqueFd listener, std::string path, Callers& callers,
                                                  Take take) {
  Result<UniqueFd> wake = make_eventfd();
  if (!wake.ok()) return wake.status();
  Result<std::unique_ptr<Airlock>> airlock = Airlock::create();
  if (!airlock.ok()) return airlock.status();
  std::unique_ptr<Acceptor> acceptor(new Acceptor(std::move(listener), std::move(*wake), std::move(path),
                                                  callers, std::move(*airlock), std::move(take)));
  try {
    acceptor->thread_ = std::thread([raw = acceptor.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    return resource_exhausted(std::string("no thread for the control socket: ") + error.what());
  }
  return acceptor;
}

Acceptor::~Acceptor() {
  stop();
  if (listener_.valid()) ::unlink(path_.c_str());  // it has never run
}

void Acceptor::stop_accepting() {
  refuses_ = true;
  ring_eventfd(wake_.get());
}

void Acceptor::stop() {
  refuses_ = true;
  stops_ = true;
  ring_eventfd(wake_.get());
  if (thread_.joinable()) thread_.join();
}

void Acceptor::run() {
  for (;;) {
    try {
      if (!turn()) return;
    } catch (const std::exception& error) {
      log_event(LogLevel::kError, "control connection lost", {{"reason", error.what()}});
    }
  }
}

// False: stop() has been called.
bool Acceptor::turn() {
  entries_.clear();
  entries_.push_back({wake_.get(), POLLIN, 0});
  entries_.push_back(entry_of(listener_.get(), accepts_ && listener_.valid() ? POLLIN : 0));
  for (const Connection& connection : connections_) {
    entries_.push_back(entry_of(connection.relay.client(), connection.relay.client_events()));
    entries_.push_back(entry_of(connection.relay.inner(), connection.relay.inner_events()));
  }
  int timeout = accepts_ ? airlock_->next_look_ms() : kPauseMs;
  if (refill_budgets() && (timeout < 0 || timeout > kRefillMs)) timeout = kRefillMs;
  const int ready = ::poll(entries_.data(), entries_.size(), timeout);
  if (ready < 0) {
    if (errno == EINTR) return !stops_;
    static LogLimiter limiter;
    limiter.log(LogLevel::kError, "control connections wait", {{"reason", errno_status("poll").message()}});
    std::this_thread::sleep_for(std::chrono::milliseconds(kPauseMs));
    return !stops_;
  }
  accepts_ = true;
  if (entries_[0].revents != 0) {
    std::uint64_t rings;
    [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &rings, sizeof(rings));
  }
  relay(2);
  if (entries_[1].revents != 0) accept_all();
  if (refuses_ && listener_.valid()) {
    airlock_->close_socket(std::move(listener_));  // with whoever has not been accepted
    ::unlink(path_.c_str());
  }
  if (stops_) {
    for (Connection& connection : connections_) {
      (void)connection.relay.move();
      end(connection);
    }
    connections_.clear();
  }
  airlock_->flush();
  return !stops_;
}

void Acceptor::relay(std::size_t at) {
  for (auto connection = connections_.begin(); connection != connections_.end(); at += 2) {
    const bool ready = entries_[at].revents != 0 || entries_[at + 1].revents != 0;
    if (!ready || connection->relay.move()) {
      ++connection;
      continue;
    }
    end(*connection);
    connection = connections_.erase(connection);
  }
}

bool Acceptor::refill_budgets() {
  const std::uint64_t now = MonotonicClock().now_ns();
  for (auto& [uid, budget] : budgets_) budget->refill(now);
  // A user's is forgotten only when it is full: coming anew gives nothing.
  std::erase_if(budgets_, [](const auto& entry) {
    return entry.second.use_count() == 1 && entry.second->left() == ByteBudget::kBurst;
  });
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return connection.relay.must_wait(); });
}

void Acceptor::end(Connection& connection) {
  callers_.remove(connection.grpc_end, connection.number);
  airlock_->close_socket(connection.relay.take_client());
}

void Acceptor::accept_all() {
  for (;;) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    Status status;
    if (socket.valid()) {
      status = admit(socket);
      airlock_->close_socket(std::move(socket));  // unless it has been admitted
      if (status.ok()) continue;
    } else if (errno == EINTR || errno == ECONNABORTED) {
      continue;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else {
      status = errno_status("accept");
    }
    static LogLimiter limiter;
    limiter.log(LogLevel::kError, "cannot accept control connections, trying again",
                {{"reason", status.message()}});
    accepts_ = false;
    return;
  }
}

// An error: not now, for want of descriptors. A connection too many is turned away, which is none.
Status Acceptor::admit(UniqueFd& socket) {
  Result<PeerIdentity> peer = peer_identity(socket.get());
  if (!peer.ok()) return {};  // it has gone
  const bool privileged = peer->uid == 0 || peer->uid == ::geteuid();
  const auto of_user = std::count_if(connections_.begin(), connections_.end(),
                                     [&](const Connection& other) { return other.uid == peer->uid; });
  const auto alike = std::count_if(connections_.begin(), connections_.end(),
                                   [&](const Connection& other) { return other.privileged == privileged; });
  if (static_cast<std::size_t>(alike) >= kMaxConnections ||
      static_cast<std::size_t>(of_user) >= kMaxConnectionsPerUser) {
    static LogLimiter limiter;
    limiter.record(
        EventKind::kRefused, LogLevel::kWarning, "control connection refused: too many",
        {{"by_uid", peer->uid}, {"by_pid", peer->pid}, {"of_user", of_user}, {"connections", alike}},
        peer->uid);
    return {};
  }
  Result<std::pair<UniqueFd, UniqueFd>> pair = stream_pair();
  if (!pair.ok()) return pair.status();
  const int grpc_end = pair->second.release();
  const std::uint64_t number = ++last_number_;
  callers_.add(grpc_end, number, {peer->uid, peer->pid, std::move(peer->gids), {}});
  std::shared_ptr<ByteBudget> budget;
  if (!privileged) {
    budget = budgets_.try_emplace(peer->uid, std::make_shared<ByteBudget>()).first->second;
  }
  connections_.push_back({number, peer->uid, privileged, grpc_end,
                          Relay(std::move(socket), std::move(pair->first), std::move(budget))});
  take_(grpc_end, privileged);
  return {};
}

}  // namespace epd
