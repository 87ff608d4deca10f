#include "health.h"

#include <string_view>
#include "epd/v1/control.pb.h"

namespace epd::control {
namespace {

constexpr std::string_view kDevicePrefix = "device/";

Health serving_if(bool serving) {
  return serving ? Health::kServing : Health::kNotServing;
}

}  // namespace

Health HealthModel::check(const std::string& service) {
  if (service.empty()) {
    if (!serving_.load()) return Health::kNotServing;
    auto daemon = facade_.daemon();
    return serving_if(daemon.ok() && daemon->state() == v1::DAEMON_STATE_SERVING);
  }
  if (service == "control" || service == "epd.v1.Control") return serving_if(facade_.daemon().ok());
  if (service == "membership") return serving_if(facade_.groups().ok());
  if (!service.starts_with(kDevicePrefix)) return Health::kNoSuchService;

  auto devices = facade_.devices();
  // If the supervisor does not answer, it is not known whether the device exists.
  if (!devices.ok()) return Health::kNotServing;
  const std::string_view name = std::string_view(service).substr(kDevicePrefix.size());
  for (const v1::Device& device : devices->devices()) {
    if (device.name() == name) return serving_if(device.state() == v1::DEVICE_STATE_READY);
  }
  return Health::kNoSuchService;
}

}  // namespace epd::control
