#include "acceptor.h"

#include "base/event.h"

#include <poll.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

namespace epd::control {
namespace {

// The connections that are counted below, and those that are being refused.
constexpr Gate::Limits kGateLimits{2 * (kMaxConnections + kMaxEndingPerUser),
                                   6 * (kMaxConnections + kMaxEndingPerUser)};
constexpr std::chrono::milliseconds kLastWords(500);
constexpr std::chrono::milliseconds kPause(200);  // after an error that only time can mend

}  // namespace

Porter Connections::porter(const std::shared_ptr<Connections>& own, std::uint64_t number,
                           const PeerIdentity& peer) {
  const bool privileged = is_privileged(peer.uid);
  const std::lock_guard lock(own->mutex_);
  own->connections_[number] = {peer.uid, privileged};
  return [own, number, budget = privileged ? nullptr : own->budget_of(peer.uid)](const Doorstep& doorstep) {
    struct Ending {
      Connections& connections;
      std::uint64_t number;
      ~Ending() { connections.end(number); }
    };
    const Ending ending{*own, number};
    std::make_unique<Relay>(doorstep, budget, own->clock_)->run();
  };
}

// A user's budget is removed only when it is full, so connecting again gains nothing.
std::shared_ptr<RelayBudget> Connections::budget_of(std::uint32_t uid) {
  const std::uint64_t now = clock_.now_ns();
  std::erase_if(budgets_,
                [&](const auto& entry) { return entry.second.use_count() == 1 && entry.second->full(now); });
  std::shared_ptr<RelayBudget>& budget = budgets_[uid];
  if (budget == nullptr) budget = std::make_shared<RelayBudget>();
  return budget;
}

Status Connections::admit(std::uint64_t number, int grpc_end, const PeerIdentity& peer) {
  const std::lock_guard lock(mutex_);
  const auto own = connections_.find(number);
  if (own == connections_.end()) return Status(StatusCode::kAborted, "it has ended");
  // Counts only admitted connections: others may have arrived after this one.
  const auto count = [&](auto&& like) {
    return static_cast<std::size_t>(
        std::count_if(connections_.begin(), connections_.end(),
                      [&](const auto& entry) { return entry.second.grpc_end >= 0 && like(entry.second); }));
  };
  const std::size_t of_user = count([&](const Connection& other) { return other.uid == peer.uid; });
  const std::size_t alike =
      count([&](const Connection& other) { return other.privileged == own->second.privileged; });
  const bool too_many_of_user = of_user >= kMaxConnectionsPerUser && !own->second.privileged;
  if (too_many_of_user || alike >= kMaxConnections) {
    const bool all = !too_many_of_user;
    return resource_exhausted((all ? "all users have " : "user " + std::to_string(peer.uid) + " has ") +
                              std::to_string(all ? alike : of_user) + " control connections; allowed: " +
                              std::to_string(all ? kMaxConnections : kMaxConnectionsPerUser));
  }
  own->second.grpc_end = grpc_end;
  if (callers_ != nullptr) callers_->add(grpc_end, number, {peer.uid, peer.pid, peer.gids, {}});
  return {};
}

void Connections::end(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto ended = connections_.extract(number);
  if (callers_ != nullptr && ended.mapped().grpc_end >= 0) callers_->remove(ended.mapped().grpc_end, number);
  ended_.notify_all();
}

void Connections::close(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  ended_.wait_for(lock, patience, [this] { return connections_.empty(); });
  callers_ = nullptr;
}

Result<std::unique_ptr<Acceptor>> Acceptor::start(UniqueFd listener, std::string path, Callers& callers,
                                                  Take take) {
  Result<UniqueFd> wake = make_eventfd();
  if (!wake.ok()) return wake.status();
  const auto connections = std::make_shared<Connections>(callers);
  Result<std::unique_ptr<Gate>> gate = Gate::open(
      std::move(listener),
      [connections](std::uint64_t number, const PeerIdentity& peer) {
        return Connections::porter(connections, number, peer);
      },
      kGateLimits);
  if (!gate.ok()) return gate.status();
  std::unique_ptr<Acceptor> acceptor(
      new Acceptor(connections, std::move(*gate), std::move(*wake), std::move(path), std::move(take)));
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

void Acceptor::stop_accepting() {
  if (gate_ == nullptr) return;
  ring_eventfd(wake_.get());
  if (thread_.joinable()) thread_.join();
  gate_.reset();
  remove_file(path_, file_);
}

void Acceptor::stop() {
  stop_accepting();
  connections_->close(kLastWords);
}

void Acceptor::run() {
  for (;;) {
    pollfd entries[2] = {{wake_.get(), POLLIN, 0}, {gate_->poll_fd(), POLLIN, 0}};
    if (::poll(entries, 2, -1) < 0 && errno != EINTR) std::this_thread::sleep_for(kPause);
    if (entries[0].revents != 0) return;
    try {
      while (std::optional<Gate::Arrival> arrival = gate_->take()) admit(std::move(*arrival));
    } catch (const std::exception& error) {
      log_event(LogLevel::kError, "control connection lost", {{"reason", error.what()}});
    }
  }
}

// Porters that have nothing left to relay, and whose tasks have not ended.
Status Acceptor::check_ending(std::uint32_t uid) const {
  const std::size_t count = gate_->porters(uid);
  const std::size_t allowed = kMaxConnections + kMaxEndingPerUser;
  if (count <= allowed) return {};
  return resource_exhausted(
      "user " + std::to_string(uid) + " has " + std::to_string(count) +
      " control connections, open or still being closed; allowed: " + std::to_string(allowed));
}

// A connection that is not admitted ends with its inner socket. If its client has ended by now, nothing is
// logged.
void Acceptor::admit(Gate::Arrival arrival) {
  static LogLimiter limiter;
  const PeerIdentity& peer = arrival.peer;
  if (!arrival.socket.valid()) {
    limiter.log(LogLevel::kError, "control connection lost: no descriptor is left", {{"by_uid", peer.uid}});
    return;
  }
  Status status = connections_->admit(arrival.number, arrival.socket.get(), peer);
  if (status.ok()) status = check_ending(peer.uid);
  if (status.ok()) {
    take_(arrival.socket.release(), is_privileged(peer.uid));
  } else if (status.code() != StatusCode::kAborted) {
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "control connection refused",
                   {{"by_uid", peer.uid}, {"by_pid", peer.pid}, {"reason", status.message()}}, peer.uid);
  }
}

}  // namespace epd::control
