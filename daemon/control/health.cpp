#include "health.h"

#include <string_view>
#include "epd/v1/control.pb.h"

namespace epd::control {
namespace {

constexpr std::string_view kDevicePrefix = "device/";

Health serving_if(bool serving) {
  return serving ? Health::kServing : Health::kNotServing;
}

Health of_daemon(const Result<v1::DaemonStatus>& daemon, bool serving) {
  return serving_if(serving && daemon.ok() && daemon.value().state() == v1::DAEMON_STATE_SERVING &&
                    daemon.value().socket_problem().empty());
}

Health of_cluster(const Result<v1::DaemonStatus>& daemon) {
  if (daemon.ok() && !daemon.value().has_cluster()) return Health::kNoSuchService;
  return serving_if(daemon.ok() && daemon.value().cluster().problem().empty());
}

Health of_device(const v1::Device& device) {
  return serving_if(device.state() == v1::DEVICE_STATE_READY);
}

bool is_daemon(const std::string& service) {
  return service.empty() || service == "daemon";
}

bool is_control(const std::string& service) {
  return service == "control" || service == "epd.v1.Control";
}

}  // namespace

Health HealthModel::check(const std::string& service) {
  if (is_daemon(service)) return serving_.load() ? of_daemon(facade_.daemon(), true) : Health::kNotServing;
  if (is_control(service)) return serving_if(facade_.daemon().ok());
  if (service == "cluster") return of_cluster(facade_.daemon());
  if (service == "membership") return serving_if(facade_.groups().ok());
  if (!service.starts_with(kDevicePrefix)) return Health::kNoSuchService;

  auto devices = facade_.devices();
  // If the supervisor does not answer, it is not known whether the device exists.
  if (!devices.ok()) return Health::kNotServing;
  const std::string_view name = std::string_view(service).substr(kDevicePrefix.size());
  for (const v1::Device& device : devices->devices()) {
    if (device.name() == name) return of_device(device);
  }
  return Health::kNoSuchService;
}

}  // namespace epd::control
