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
#include <map>
#include <memory>
#include <span>
#include <vector>

namespace epd::device {

class WorkerLane;

class RetiredMemory {
 public:
  explicit RetiredMemory(const CudaDriver& driver) : driver_(driver) {}

  // The driver opens a handle once, and gives the same address again. False: what it has given is still the
  // memory of another allocation (`id` as its process knows it), which has been freed and waits here.
  bool note_opened(CUdeviceptr base, std::uint64_t id, std::uint64_t bytes);
  // Takes an address that cuIpcOpenMemHandle gave, once for each time.
  void add_opened(CUdeviceptr base);
  void add(std::unique_ptr<Arena> memory, std::uint64_t bytes);
  // So much waits already that nothing more should be mapped that may have to wait as well.
  bool is_full() const { return waiting_bytes_ >= kMostBytes; }

  // Called in each round of the loop. `rest_is_idle`: whether streams other than the lanes' have nothing
  // left. True: it is under way and has to be called soon again.
  bool advance(std::span<WorkerLane* const> lanes, std::uint64_t now_ns,
               const std::function<bool()>& rest_is_idle);

 private:
  static constexpr std::uint64_t kMostBytes = std::uint64_t{8} << 30;

  static bool has_called(std::span<WorkerLane* const> lanes, std::uint64_t since_ns);
  void begin(std::span<WorkerLane* const> lanes, std::uint64_t now_ns);
  void end(std::span<WorkerLane* const> lanes, std::uint64_t next_ns);
  void close();

  struct Opened {
    std::uint64_t id = 0;
    std::uint64_t bytes = 0;
    std::uint32_t times = 0;
  };

  const CudaDriver& driver_;
  std::map<CUdeviceptr, Opened> opened_;
  std::vector<CUdeviceptr> to_close_;
  std::vector<std::unique_ptr<Arena>> arenas_;  // their ends may add to to_close_
  std::uint64_t waiting_bytes_ = 0;             // of both
  std::uint64_t arena_bytes_ = 0;
  std::uint64_t draining_since_ns_ = 0;  // 0: not now
  std::uint64_t next_try_ns_ = 0;
  std::uint64_t tries_ = 0;  // that were given up, since the last one that was not
};

}  // namespace epd::device
