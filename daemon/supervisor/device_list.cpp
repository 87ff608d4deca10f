#include "device_list.h"

#include "base/event.h"

#include <algorithm>
#include <string>
#include <utility>

namespace epd::supervisor {
namespace {

bool is_cuda(const device::DeviceName& name) {
  return name.kind == abi::DeviceKind::kCuda;
}

void tell_of(const ServedDevice& device) {
  const device::DeviceName& name = device.name;
  const device::DeviceFacts& facts = device.facts;
  log_event(LogLevel::kInfo, "GPU found",
            {{"device", name.text()},
             {"model", facts.model},
             {"sms", facts.num_sms},
             {"driver", facts.driver},
             {"mps", facts.mps}});
  if (!facts.mps) {
    log_event(
        LogLevel::kWarning,
        "without MPS clients and the engine take turns on the GPU: each hand-off between them costs some 140 "
        "to 280 us; start nvidia-cuda-mps-control -d before epd and its clients",
        {{"device", name.text()}});
  }
}

}  // namespace

Result<DeviceList> DeviceList::find(const Config& config) {
  Result<DeviceChoice> choice = choose_devices(config);
  if (!choice.ok()) return choice.status();
  DeviceList list;
  list.skipped_ = std::move(choice->skipped);
  list.host_instead_ = choice->host_instead;
  for (ServedDevice& device : choice->devices) list.devices_.push_back({std::move(device), {}});
  Status status = list.find_unreachable();
  return status.ok() ? Result<DeviceList>(std::move(list)) : status;
}

void DeviceList::tell() const {
  if (host_instead_) {
    record_event(EventKind::kOther, LogLevel::kWarning,
                 "no GPU found: a host device is served in its place, whose operations run on processors",
                 {{"reason", why_no_gpu()},
                  {"remedy",
                   "devices.host = 0 refuses to start without a GPU; devices.host = 1 says that a host "
                   "device is wanted"}});
  }
  for (const std::string& reason : skipped_)
    log_event(LogLevel::kWarning, "GPU not served", {{"reason", reason}});
  for (const Device& device : devices_) {
    if (is_cuda(device.name)) tell_of(device);
    for (const std::uint32_t other : device.unreachable) {
      if (devices_[other].name.index > device.name.index) continue;  // it is told once of both
      log_event(LogLevel::kError,
                "two GPUs can't map each other's memory (no P2P); groups with ranks on both are refused",
                {{"device", devices_[other].name.text()}, {"other", device.name.text()}});
    }
  }
}

std::string DeviceList::text() const {
  std::string text;
  for (const Device& device : devices_) text.append(text.empty() ? "" : ", ").append(device.name.text());
  return text;
}

bool DeviceList::any_under_mps() const {
  return std::any_of(devices_.begin(), devices_.end(), [](const Device& d) { return d.facts.mps; });
}

// The daemon serves such devices nevertheless: groups on one of them, or on other pairs, need no path between
// them.
Status DeviceList::find_unreachable() {
  for (std::uint32_t i = 0; i < devices_.size(); ++i) {
    for (std::uint32_t k = 0; k < i; ++k) {
      Result<bool> reach = device::devices_reach_each_other(devices_[k].name, devices_[i].name);
      if (!reach.ok()) return reach.status();
      if (*reach) continue;
      devices_[i].unreachable.push_back(k);
      devices_[k].unreachable.push_back(i);
    }
  }
  return {};
}

bool DeviceList::is_gpu(std::uint32_t device) const {
  return is_cuda(devices_[device].name);
}

}  // namespace epd::supervisor
