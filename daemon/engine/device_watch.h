// The loop's work for the device as a whole: it lets the device continue, counts what the device reports, and
// checks now and then whether it has failed.
#pragma once

#include "device/device.h"
#include "page.h"

#include <cstdint>

namespace epd::engine {

class DeviceWatch {
 public:
  DeviceWatch(device::Device& device, Page& page) : device_(device), page_(page) {}

  // Called in each round, before whatever waits for the device.
  void advance();
  // Called at the end of each round. Ends the process if the device has failed.
  void check(std::uint64_t now_ns);
  // A client has gone. If that took the device along, it shows a moment later.
  void note_client_gone(std::uint64_t now_ns);
  // When the device next needs a round.
  std::uint64_t next_look_ns(std::uint64_t now_ns) const;

 private:
  void note_stuck();

  device::Device& device_;
  Page& page_;
  std::uint64_t next_check_ns_ = 0;
  std::uint64_t check_often_ns_ = 0;  // check more often until then
  bool busy_ = false;                 // the device has work of its own under way
};

// A GPU rings no bell for what it has done.
inline constexpr std::uint64_t kDeviceLookNs = 50'000;

}  // namespace epd::engine
