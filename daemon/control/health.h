// What grpc.health.v1 says about each name, computed from the facade when asked. No gRPC here.
//   "daemon", ""             the daemon: serving and admitting clients
//   "control", "epd.v1.Control"   the supervisor's loop answers
//   "membership"             likewise, since it knows the groups
//   "device/<name>"          that device is ready; its name as in ListDevices
//   "cluster"                the coordinator answers, or this node is the coordinator; only in a cluster
#pragma once

#include "supervisor/control_facade.h"

#include <atomic>
#include <string>

namespace epd::control {

// For the message about a name that is none of them.
inline constexpr const char* kHealthNames =
    "daemon (or ''), control (or epd.v1.Control), membership, device/NAME; with a cluster also cluster";

enum class Health { kServing, kNotServing, kNoSuchService };

class HealthModel {
 public:
  explicit HealthModel(supervisor::ControlFacade& facade) : facade_(facade) {}

  // Any thread.
  void set_serving(bool serving) { serving_.store(serving); }
  // Any thread. Calls the facade at most once.
  Health check(const std::string& service);

 private:
  supervisor::ControlFacade& facade_;
  std::atomic<bool> serving_{false};
};

}  // namespace epd::control
