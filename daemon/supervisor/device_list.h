// The devices that this daemon serves, as they were found at start.
#pragma once

#include "common/status.h"
#include "device_choice.h"
#include "supervisor/config.h"

#include <cstdint>
#include <vector>

namespace epd::supervisor {

class DeviceList {
 public:
  struct Device : ServedDevice {
    std::vector<std::uint32_t> unreachable;  // indices
  };

  // See choose_devices().
  static Result<DeviceList> find(const Config& config);

  std::size_t size() const { return devices_.size(); }
  const Device& operator[](std::uint32_t device) const { return devices_[device]; }
  const std::vector<Device>& all() const { return devices_; }
  bool any_under_mps() const;

  // A kernel of its engine is, and operations are calls.
  bool is_resident(std::uint32_t device) const;

 private:
  DeviceList() = default;
  Status find_unreachable();

  std::vector<Device> devices_;
};

}  // namespace epd::supervisor
