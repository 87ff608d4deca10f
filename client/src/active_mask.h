// The ranks that take part, as words that the caller's kernels read (epd_group_active_mask).
#pragma once

#include "common/status.h"
#include "proto/shape.h"

#include <array>
#include <cstdint>
#include <mutex>

namespace epd::client {

class Device;
struct Group;

class ActiveMask {
 public:
  // Writes what the board says now into the group's memory. Returns when that is done. `device`: null on a
  // host device.
  Status write(const Group& group, Device* device);

 private:
  std::array<std::int32_t, abi::kMaxRanks> written_{};  // the group's memory begins as zeros
  std::mutex mutex_;  // of threads that resume at the same time: the last one writes what is newest
};

// Where it lies: int32 [num_ranks].
const std::int32_t* active_mask_of(const Group& group);

}  // namespace epd::client
