// Names of devices: "host:N" is emulated, "cuda:N" a GPU as the driver numbers them.
#pragma once

#include "common/status.h"
#include "proto/wire.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace epd::device {

struct DeviceName {
  abi::DeviceKind kind = abi::DeviceKind::kHost;
  std::uint32_t index = 0;

  std::string text() const {
    return (kind == abi::DeviceKind::kCuda ? "cuda:" : "host:") + std::to_string(index);
  }
};

// INVALID_ARGUMENT for a name that is not understood.
Result<DeviceName> parse_device_name(std::string_view text);

}  // namespace epd::device
