#include "device_list.h"

#include "base/log.h"

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
             {"partition_sms", facts.sm_partition},
             {"mps", facts.mps},
             {"mode", launch_mode_text(device.mode)},
             {"mode_by", device.mode_reason}});
  if (!facts.mps) {
    log_event(
        LogLevel::kWarning,
        "without MPS clients and the engine take turns on the GPU: each hand-off between them costs about "
        "280 us, and no kernel can stay resident; start nvidia-cuda-mps-control -d before epd and its "
        "clients",
        {{"device", name.text()}});
  }
}

}  // namespace

Result<DeviceList> DeviceList::find(const Config& config) {
  Result<DeviceChoice> choice = choose_devices(config);
  if (!choice.ok()) return choice.status();
  for (const std::string& reason : choice->skipped)
    log_event(LogLevel::kWarning, "GPU not served", {{"reason", reason}});
  DeviceList list;
  for (ServedDevice& device : choice->devices) {
    if (is_cuda(device.name)) tell_of(device);
    list.devices_.push_back({std::move(device), {}});
  }
  Status status = list.find_unreachable();
  return status.ok() ? Result<DeviceList>(std::move(list)) : status;
}

bool DeviceList::any_under_mps() const {
  return std::any_of(devices_.begin(), devices_.end(), [](const Device& d) { return d.facts.mps; });
}

// The daemon serves such devices all the same: groups within one, or on others, need no way between them.
Status DeviceList::find_unreachable() {
  for (std::uint32_t i = 0; i < devices_.size(); ++i) {
    for (std::uint32_t k = 0; k < i; ++k) {
      Result<bool> reach = device::devices_reach_each_other(devices_[k].name, devices_[i].name);
      if (!reach.ok()) return reach.status();
      if (*reach) continue;
      devices_[i].unreachable.push_back(k);
      devices_[k].unreachable.push_back(i);
      log_event(LogLevel::kError,
                "two GPUs can't map each other's memory (no P2P); groups with ranks on both are refused",
                {{"device", devices_[k].name.text()}, {"other", devices_[i].name.text()}});
    }
  }
  return {};
}

bool DeviceList::is_resident(std::uint32_t device) const {
  return is_cuda(devices_[device].name) && devices_[device].mode == device::LaunchMode::kResident;
}

}  // namespace epd::supervisor
