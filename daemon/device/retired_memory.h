// Clients' memory that is no longer wanted, until no kernel can use it. Closing memory of cudaMalloc waits
// for everything that the context has enqueued, and kernels that wait for calls are always enqueued ahead. So
// the device holds back further ones for a moment, lets those that are there run without calls, and closes
// the memory when nothing is left. Calls that come meanwhile are carried out by the kernels that are left;
// then the moment is given up.
#pragma once

#include "cuda_driver.h"
#include "device/device.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace epd::device {

class WorkerLane;

class RetiredMemory {
 public:
  explicit RetiredMemory(const CudaDriver& driver) : driver_(driver) {}

  void add(std::unique_ptr<Arena> memory) { arenas_.push_back(std::move(memory)); }
  // The address that cuIpcOpenMemHandle gave.
  void add_opened(CUdeviceptr base) { opened_.push_back(base); }
  bool empty() const { return arenas_.empty() && opened_.empty(); }

  // Called in each round of the loop. `rest_is_idle`: whether streams other than the lanes' have nothing
  // left. True: it is under way and has to be called soon again.
  bool advance(std::span<WorkerLane* const> lanes, std::uint64_t now_ns,
               const std::function<bool()>& rest_is_idle);

 private:
  static bool has_called(std::span<WorkerLane* const> lanes, std::uint64_t since_ns);
  void begin(std::span<WorkerLane* const> lanes, std::uint64_t now_ns);
  void end(std::span<WorkerLane* const> lanes, std::uint64_t next_ns);
  void close();

  const CudaDriver& driver_;
  std::vector<CUdeviceptr> opened_;
  std::vector<std::unique_ptr<Arena>> arenas_;  // their ends may add to opened_
  std::uint64_t draining_since_ns_ = 0;         // 0: not now
  std::uint64_t next_try_ns_ = 0;
  std::uint64_t pause_ns_ = 0;  // after a try that was given up
};

}  // namespace epd::device
