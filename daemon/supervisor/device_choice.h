// Which devices a daemon serves, from devices.cuda and devices.host.
#pragma once

#include "device/device.h"
#include "device/memory.h"
#include "supervisor/config.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace epd::supervisor {

struct ServedDevice {
  device::DeviceName name;
  device::DeviceFacts facts;
};

// Why a machine shows no GPU, as text for people.
const char* why_no_gpu();

struct DeviceChoice {
  std::vector<ServedDevice> devices;  // GPUs by number, then host devices
  std::vector<std::string> skipped;   // GPUs that "auto" has left out, with the reason
  bool host_instead = false;          // there is no GPU, and "auto" has taken a host device in its place
};

// The machine, as this room asks about it. Tests replace it.
struct Machine {
  std::function<Result<std::uint32_t>()> num_gpus = device::num_gpus;
  std::function<Result<device::DeviceFacts>(const device::DeviceName&)> facts = device::device_facts;
};

// UNSUPPORTED: a GPU that was asked for does not exist or can't be used.
// INVALID_ARGUMENT: no device is left to serve.
Result<DeviceChoice> choose_devices(const Config& config, const Machine& machine = {});

}  // namespace epd::supervisor
