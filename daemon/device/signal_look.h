// A lane's looks at what ranks have signalled to its own: all its exchange blocks in one copy, in the stream
// aside. Nobody waits for it.
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

  // Of the lane's pinned memory.
  std::size_t host_bytes() const;
  // Zeroed. Once, before all else.
  void open(std::byte* host) { host_ = host; }

  // Unless one is under way.
  void begin();
  // begin(), if the last one was not just now.
  void begin_now_and_then();
  // The last one that has come.
  const SignalCopy* seen();
  // It writes the pinned memory, and reads the arena.
  bool under_way();

 private:
  std::size_t row_bytes() const;  // of a block
  std::uint32_t& number() const;  // of the look that has brought what lies there

  CudaDevice& device_;
  const LaneShape& shape_;
  std::byte* host_ = nullptr;
  SignalCopy copy_;
  std::uint32_t looks_ = 0;
  std::uint64_t begun_ns_ = 0;  // of the last one
  bool under_way_ = false;
};

}  // namespace epd::device
