// What the loop does for the device itself, whoever's operations it runs: it lets the device go on, counts
// what the device says of itself, and asks now and then whether it has failed.
#pragma once

#include "device/device.h"
#include "page.h"

#include <cstdint>

namespace epd::engine {

class DeviceWatch {
 public:
  DeviceWatch(device::Device& device, Page& page) : device_(device), page_(page) {}

  // In each round, before what waits for the device.
  void advance();
  // In each round, at its end. Ends the process if the device has failed.
  void check(std::uint64_t now_ns);
  // A client has gone. That it took the device along shows a moment later.
  void note_client_gone(std::uint64_t now_ns);
  // When a round is due for the device's sake.
  std::uint64_t next_look_ns(std::uint64_t now_ns) const;

 private:
  void note_stuck();

  device::Device& device_;
  Page& page_;
  std::uint64_t next_check_ns_ = 0;
  std::uint64_t check_often_ns_ = 0;  // until then
  bool busy_ = false;                 // with what it does by itself
};

// Nobody rings for what a GPU has done.
inline constexpr std::uint64_t kDeviceLookNs = 50'000;

}  // namespace epd::engine
