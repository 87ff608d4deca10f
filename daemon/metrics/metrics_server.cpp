#include "metrics/metrics_server.h"

#include "base/log.h"
#include "families.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <exception>
#include <utility>

namespace epd::metrics {
namespace {

using supervisor::ControlFacade;

constexpr std::size_t kThreads = 2;  // of the HTTP server: requests at one time

class Reader final : public prometheus::Collectable {
 public:
  Reader(ControlFacade& facade, std::size_t max_groups) : facade_(facade), max_groups_(max_groups) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    Result<Snapshot> snapshot = take_snapshot(facade_);
    return snapshot.ok() ? families_of(*snapshot, max_groups_) : families_of_silence();
  }

 private:
  ControlFacade& facade_;
  const std::size_t max_groups_;
};

class Server final : public MetricsServer {
 public:
  Server(ControlFacade& facade, const MetricsOptions& options)
      : reader_(std::make_shared<Reader>(facade, options.max_groups)), exposer_(options.listen, kThreads) {
    exposer_.RegisterCollectable(reader_);
  }
  int port() const override { return exposer_.GetListeningPorts().front(); }

 private:
  std::shared_ptr<Reader> reader_;
  prometheus::Exposer exposer_;
};

}  // namespace

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(ControlFacade& facade,
                                                            const MetricsOptions& options) {
  try {
    auto server = std::make_unique<Server>(facade, options);
    log_event(LogLevel::kInfo, "metrics are served", {{"listen", options.listen}, {"port", server->port()}});
    return std::unique_ptr<MetricsServer>(std::move(server));
  } catch (const std::exception& error) {
    return Status(StatusCode::kResourceExhausted,
                  "metrics.listen is \"" + options.listen + "\": " + error.what() +
                      "; allowed: an address of this machine and a port that is free");
  }
}

}  // namespace epd::metrics
