#include "health.h"

#include <string_view>

namespace epd::control {
namespace {

constexpr std::string_view kDevicePrefix = "device/";

Health serving_if(bool serving) {
  return serving ? Health::kServing : Health::kNotServing;
}

bool is_daemon(const std::string& service) {
  return service.empty() || service == "daemon";
}

bool is_control(const std::string& service) {
  return service == "control" || service == "epd.v1.Control";
}

}  // namespace

Health HealthModel::check(const std::string& service) {
  if (is_daemon(service) && !serving_.load()) return Health::kNotServing;
  const bool about_device = service.starts_with(kDevicePrefix);
  if (!is_daemon(service) && !is_control(service) && service != "membership" && service != "cluster" &&
      !about_device)
    return Health::kNoSuchService;
  Result<supervisor::HealthFacts> facts = facade_.health();
  // If the supervisor does not answer, it is not known whether the device exists.
  if (!facts.ok()) return Health::kNotServing;
  if (is_daemon(service)) return serving_if(facts->serving && facts->socket_problem.empty());
  if (service == "cluster")
    return facts->cluster_problem ? serving_if(facts->cluster_problem->empty()) : Health::kNoSuchService;
  if (!about_device) return Health::kServing;
  const auto device = facts->devices.find(service.substr(kDevicePrefix.size()));
  return device == facts->devices.end() ? Health::kNoSuchService : serving_if(device->second);
}

}  // namespace epd::control
