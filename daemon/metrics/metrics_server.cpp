#include "metrics/metrics_server.h"

#include "base/clock.h"
#include "base/log.h"
#include "common/fd.h"
#include "families.h"
#include "http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include "epd/v1/control.pb.h"

namespace epd::metrics {
namespace {

using supervisor::ControlFacade;

constexpr int kBacklog = 128;

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
};

Address address_of(const std::string& text) {
  Address address;
  const std::size_t colon = text.rfind(':');
  const auto port = htons(static_cast<std::uint16_t>(std::strtoul(text.c_str() + colon + 1, nullptr, 10)));
  if (text.front() == '[') {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address.bytes);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = port;
    ::inet_pton(AF_INET6, text.substr(1, colon - 2).c_str(), &v6.sin6_addr);
    address.size = sizeof(v6);
  } else {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address.bytes);
    v4.sin_family = AF_INET;
    v4.sin_port = port;
    ::inet_pton(AF_INET, text.substr(0, colon).c_str(), &v4.sin_addr);
    address.size = sizeof(v4);
  }
  return address;
}

// Opens a non-blocking socket that listens at an address and a port that the configuration has checked:
// "127.0.0.1:0", "[::1]:9455". PERMISSION_DENIED, with what to do: the kernel or a service's sandbox allows
// no network socket. RESOURCE_EXHAUSTED, with the system's reason.
Result<UniqueFd> open_listener(const std::string& listen) {
  const Address address = address_of(listen);
  const std::string option = "metrics.listen is \"" + listen + "\": ";
  UniqueFd listener(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid() && (errno == EAFNOSUPPORT || errno == EPERM || errno == EACCES)) {
    return Status(
        StatusCode::kPermissionDenied,
        option + "this process may open no network socket: " + std::strerror(errno) +
            "; allowed: where the service has a network (OPERATING.md, \"Watching\", has the drop-in)");
  }
  const int on = 1;
  if (listener.valid()) ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (!listener.valid() || ::bind(listener.get(), address.get(), address.size) != 0 ||
      ::listen(listener.get(), kBacklog) != 0) {
    return resource_exhausted(option + std::strerror(errno) +
                              "; allowed: an address of this machine and a port that is free");
  }
  return listener;
}

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
  Result<UniqueFd> listener = open_listener(options.listen);
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
