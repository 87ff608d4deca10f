// Pages over HTTP for anybody who reaches the port: GET /metrics (Prometheus), /healthz and /readyz (probes).
// They change nothing.
#pragma once

#include "base/call_times.h"
#include "common/status.h"
#include "supervisor/control_facade.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace epd::metrics {

struct MetricsOptions {
  std::string listen;            // "HOST:PORT": an address of this machine, and 0 for any free port
  std::uint32_t max_groups = 0;  // the rest is summed up as group "other"
  std::uint32_t max_ranks = 0;   // of a group; the rest is summed up as rank "other"
  // Whether the service serves, as grpc.health.v1 on the control socket says: "control", "daemon".
  std::function<bool(const char* service)> healthy;
};

class MetricsServer {
 public:
  // RESOURCE_EXHAUSTED if the address can't be had. The facade and `calls`, those of the control plane,
  // outlive the server.
  static Result<std::unique_ptr<MetricsServer>> start(supervisor::ControlFacade& facade,
                                                      const CallTimes& calls, const MetricsOptions& options);
  virtual ~MetricsServer() = default;
  virtual int port() const = 0;
};

}  // namespace epd::metrics
