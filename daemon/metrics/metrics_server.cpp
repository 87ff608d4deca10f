#include "metrics/metrics_server.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/network.h"
#include "common/fd.h"
#include "families.h"

#include <netinet/in.h>
#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <sys/socket.h>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

namespace epd::metrics {
namespace {

using supervisor::ControlFacade;

constexpr const char* kThreads = "16";          // of the HTTP server: connections at one time
constexpr const char* kRequestTimeMs = "5000";  // a client that says nothing holds a thread for so long

// 0: not a socket of TCP or UDP.
int own_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return 0;
}

// The socket that listens at the port, and all connections that have come to it: whoever waits for them wakes
// up and finds their end. A number may be another file's by now; a duplicate is of one file for good.
void shut_down_port(int port) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int number = std::atoi(entry.path().filename().c_str());
    if (own_port(number) != port) continue;
    Result<UniqueFd> socket = duplicate(number);
    if (socket.ok() && own_port(socket->get()) == port) ::shutdown(socket->get(), SHUT_RDWR);
  }
}

class Reader final : public prometheus::Collectable {
 public:
  Reader(ControlFacade& facade, const CallTimes& calls, const MetricsOptions& options)
      : facade_(facade), calls_(calls), options_(options), ranks_(options.max_ranks, clock_) {}

  // One at a time: each goes on from what the one before has told.
  std::vector<prometheus::MetricFamily> Collect() const override {
    const std::lock_guard lock(mutex_);
    Result<Snapshot> snapshot = take_snapshot(facade_, options_.max_ranks);
    if (snapshot.ok()) snapshot->calls = calls_.all();
    return snapshot.ok() ? families_of(*snapshot, options_.max_groups, ranks_) : families_of_silence();
  }

 private:
  ControlFacade& facade_;
  const CallTimes& calls_;
  const MetricsOptions options_;
  const MonotonicClock clock_;
  mutable std::mutex mutex_;
  mutable RankSeries ranks_;
};

class Server final : public MetricsServer {
 public:
  Server(ControlFacade& facade, const CallTimes& calls, const MetricsOptions& options)
      : reader_(std::make_shared<Reader>(facade, calls, options)),
        exposer_(std::make_unique<prometheus::Exposer>(
            std::vector<std::string>{"listening_ports", options.listen, "num_threads", kThreads,
                                     "request_timeout_ms", kRequestTimeMs})) {
    exposer_->RegisterCollectable(reader_);
  }
  // By itself the library looks every two seconds whether it is to end, also for each client that says
  // nothing.
  ~Server() override {
    shut_down_port(port());
    exposer_.reset();
  }
  int port() const override { return exposer_->GetListeningPorts().front(); }

 private:
  std::shared_ptr<Reader> reader_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(ControlFacade& facade, const CallTimes& calls,
                                                            const MetricsOptions& options) {
  // The library does not say why it can't listen.
  if (const auto tried = open_listener("metrics.listen", options.listen, 1); !tried.ok())
    return tried.status();
  try {
    auto server = std::make_unique<Server>(facade, calls, options);
    log_event(LogLevel::kInfo, "metrics are served", {{"listen", options.listen}, {"port", server->port()}});
    return std::unique_ptr<MetricsServer>(std::move(server));
  } catch (const std::exception& error) {
    return Status(StatusCode::kResourceExhausted,
                  "metrics.listen is \"" + options.listen + "\": " + error.what());
  }
}

}  // namespace epd::metrics
