// What grpc.health.v1 says about each name, computed from the facade when asked. No gRPC here.
//   ""                       the daemon: serving and admitting clients
//   "control", "epd.v1.Control"   the supervisor's loop answers
//   "membership"             groups can be listed
//   "device/<name>"          that device is ready; its name as in ListDevices
#pragma once

#include "supervisor/control_facade.h"

#include <atomic>
#include <string>

namespace epd::control {

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
