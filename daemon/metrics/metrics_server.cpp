#include "metrics/metrics_server.h"

#include "base/clock.h"
#include "base/log.h"
#include "common/fd.h"
#include "families.h"

#include <netdb.h>
#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <sys/socket.h>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace epd::metrics {
namespace {

using supervisor::ControlFacade;

constexpr const char* kThreads = "2";           // of the HTTP server: requests at one time
constexpr const char* kRequestTimeMs = "5000";  // a client that says nothing holds a thread for so long
constexpr std::chrono::milliseconds kWakePause(5);

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { ::freeaddrinfo(addresses); }
};

// Connects to whoever listens there, and is content with that.
void knock(const std::string& listen, int port) {
  const std::size_t colon = listen.rfind(':');
  std::string host = listen.substr(0, colon);
  if (host.starts_with('[')) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return;
  const std::unique_ptr<addrinfo, FreeAddresses> address(found);
  const UniqueFd socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.valid()) (void)::connect(socket.get(), address->ai_addr, address->ai_addrlen);
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
      : listen_(options.listen),
        reader_(std::make_shared<Reader>(facade, calls, options)),
        exposer_(std::make_unique<prometheus::Exposer>(
            std::vector<std::string>{"listening_ports", options.listen, "num_threads", kThreads,
                                     "request_timeout_ms", kRequestTimeMs})) {
    exposer_->RegisterCollectable(reader_);
  }
  // The server looks every two seconds whether it is to stop, and after each connection.
  ~Server() override {
    const int port = this->port();
    std::atomic<bool> stopped = false;
    std::thread waker;
    try {
      waker = std::thread([&] {
        while (!stopped.load()) {
          knock(listen_, port);
          std::this_thread::sleep_for(kWakePause);
        }
      });
    } catch (const std::system_error&) {  // then it takes these two seconds
    }
    exposer_.reset();
    stopped.store(true);
    if (waker.joinable()) waker.join();
  }
  int port() const override { return exposer_->GetListeningPorts().front(); }

 private:
  const std::string listen_;
  std::shared_ptr<Reader> reader_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(ControlFacade& facade, const CallTimes& calls,
                                                            const MetricsOptions& options) {
  try {
    auto server = std::make_unique<Server>(facade, calls, options);
    log_event(LogLevel::kInfo, "metrics are served", {{"listen", options.listen}, {"port", server->port()}});
    return std::unique_ptr<MetricsServer>(std::move(server));
  } catch (const std::exception& error) {
    return Status(StatusCode::kResourceExhausted,
                  "metrics.listen is \"" + options.listen + "\": " + error.what() +
                      "; allowed: an address of this machine and a port that is free");
  }
}

}  // namespace epd::metrics
