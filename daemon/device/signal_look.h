// Copies what ranks have signalled to a lane: all its exchange blocks in one copy, in the stream aside.
// Nobody waits for it.
#pragma once

#include "cuda_driver.h"
#include "device/launcher.h"

#include <cstddef>
#include <cstdint>

namespace epd::device {

class CudaDevice;

class SignalLook {
 public:
  SignalLook(CudaDevice& device, const LaneShape& shape);

  // Bytes of the lane's pinned memory.
  std::size_t host_bytes() const;
  // Called once, before all else. The memory is zeroed.
  void open(std::byte* host) { host_ = host; }

  // Begins a copy unless one is under way.
  void begin();
  // Calls begin(), unless the last copy was a moment ago.
  void begin_now_and_then();
  // The last complete copy.
  const SignalCopy* seen();
  // A copy writes the pinned memory, and reads the arena.
  bool under_way();

 private:
  std::size_t row_bytes() const;  // of a block
  std::uint32_t& number() const;  // of the look that has copied what lies there

  CudaDevice& device_;
  const LaneShape& shape_;
  std::byte* host_ = nullptr;
  SignalCopy copy_;
  std::uint32_t looks_ = 0;
  std::uint64_t begun_ns_ = 0;  // when the last copy was begun
  bool under_way_ = false;
};

}  // namespace epd::device
