// Prometheus reads the daemon over HTTP: GET /metrics. Reads only; no call of it changes anything.
#pragma once

#include "common/status.h"
#include "supervisor/control_facade.h"

#include <cstdint>
#include <memory>
#include <string>

namespace epd::metrics {

struct MetricsOptions {
  std::string listen;            // "HOST:PORT": an address of this machine, and 0 for any free port
  std::uint32_t max_groups = 0;  // with series of their own; the rest is summed up as group "other"
};

class MetricsServer {
 public:
  // RESOURCE_EXHAUSTED if the address can't be had. The facade outlives the server.
  static Result<std::unique_ptr<MetricsServer>> start(supervisor::ControlFacade& facade,
                                                      const MetricsOptions& options);
  virtual ~MetricsServer() = default;
  virtual int port() const = 0;
};

}  // namespace epd::metrics
