#include "metrics/metrics_server.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/network.h"
#include "common/fd.h"
#include "families.h"
#include "http_server.h"

#include <netinet/in.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <utility>
#include "epd/v1/control.pb.h"

namespace epd::metrics {
namespace {

using supervisor::ControlFacade;

constexpr int kBacklog = 128;

int own_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// Makes the pages. Only the server's thread calls: each scrape continues from the one before.
class Reader {
 public:
  Reader(ControlFacade& facade, const CallTimes& calls, const MetricsOptions& options)
      : facade_(facade), calls_(calls), options_(options), ranks_(options.max_ranks, clock_) {}

  HttpAnswer metrics() {
    Result<Snapshot> snapshot = take_snapshot(facade_, options_.max_ranks);
    if (snapshot.ok()) snapshot->calls = calls_.all();
    return {200,
            prometheus::TextSerializer().Serialize(
                snapshot.ok() ? families_of(*snapshot, options_.max_groups, ranks_) : families_of_silence())};
  }
  HttpAnswer live() const {
    return options_.healthy("control") ? HttpAnswer{200, "ok\n"}
                                       : HttpAnswer{503, "the supervisor does not answer\n"};
  }
  HttpAnswer ready() const {
    if (options_.healthy("daemon")) return {200, "ok\n"};
    Result<supervisor::HealthFacts> facts = facade_.health();
    if (facts.ok() && !facts->socket_problem.empty()) return {503, facts->socket_problem + "\n"};
    return {503, "the daemon does not serve: it starts, drains, or does not answer\n"};
  }

 private:
  ControlFacade& facade_;
  const CallTimes& calls_;
  const MetricsOptions options_;
  const MonotonicClock clock_;
  RankSeries ranks_;
};

class Server final : public MetricsServer {
 public:
  Server(std::unique_ptr<Reader> reader, std::unique_ptr<HttpServer> http, int port)
      : reader_(std::move(reader)), http_(std::move(http)), port_(port) {}
  int port() const override { return port_; }

 private:
  std::unique_ptr<Reader> reader_;
  std::unique_ptr<HttpServer> http_;  // declared after what it reads
  const int port_;
};

}  // namespace

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(ControlFacade& facade, const CallTimes& calls,
                                                            const MetricsOptions& options) {
  Result<UniqueFd> listener = open_listener("metrics.listen", options.listen, kBacklog);
  if (!listener.ok()) return listener.status();
  const int port = own_port(listener->get());
  auto reader = std::make_unique<Reader>(facade, calls, options);
  Result<std::unique_ptr<HttpServer>> http =
      HttpServer::start(std::move(*listener), {{"/metrics", [r = reader.get()] { return r->metrics(); }},
                                               {"/healthz", [r = reader.get()] { return r->live(); }},
                                               {"/readyz", [r = reader.get()] { return r->ready(); }}});
  if (!http.ok()) return http.status();
  log_event(LogLevel::kInfo, "metrics are served", {{"listen", options.listen}, {"port", port}});
  return std::unique_ptr<MetricsServer>(std::make_unique<Server>(std::move(reader), std::move(*http), port));
}

}  // namespace epd::metrics
