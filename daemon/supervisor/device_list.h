// The devices that this daemon serves, as they were found at start.
#pragma once

#include "common/status.h"
#include "device/device.h"
#include "device/memory.h"
#include "supervisor/config.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd {

class DeviceList {
 public:
  struct Device {
    DeviceName name;
    DeviceFacts facts;
    std::vector<std::uint32_t> unreachable;  // indices
  };

  // In the order of their names and numbers. UNSUPPORTED if the configuration asks for what a GPU can't do.
  static Result<DeviceList> find(const Config& config);

  std::size_t size() const { return devices_.size(); }
  const Device& operator[](std::uint32_t device) const { return devices_[device]; }
  const std::vector<Device>& all() const { return devices_; }
  std::vector<std::string> names() const;
  bool any_under_mps() const;

  // See MemberMemory.
  Status check_reach(std::uint32_t device, std::uint32_t other) const;
  Status check_commands(std::uint32_t device) const;

 private:
  explicit DeviceList(LaunchMode mode) : mode_(mode) {}
  Status add(abi::DeviceKind kind, std::uint32_t count);
  Status find_unreachable();

  LaunchMode mode_;
  std::vector<Device> devices_;
};

}  // namespace epd
