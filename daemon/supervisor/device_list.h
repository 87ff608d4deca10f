// The devices that this daemon serves, as found at start.
#pragma once

#include "common/status.h"
#include "device_choice.h"
#include "supervisor/config.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::supervisor {

class DeviceList {
 public:
  struct Device : ServedDevice {
    std::vector<std::uint32_t> unreachable;  // indices
  };

  // See choose_devices().
  static Result<DeviceList> find(const Config& config);

  // Logs what was found, and what was not served.
  void tell() const;
  std::string text() const;  // "cuda:0, host:0"

  std::size_t size() const { return devices_.size(); }
  const Device& operator[](std::uint32_t device) const { return devices_[device]; }
  const std::vector<Device>& all() const { return devices_; }
  bool any_under_mps() const;

  // Then its operations are calls.
  bool is_gpu(std::uint32_t device) const;

 private:
  DeviceList() = default;
  Status find_unreachable();

  std::vector<Device> devices_;
  std::vector<std::string> skipped_;  // GPUs that are not served: why
  bool host_instead_ = false;
};

}  // namespace epd::supervisor
