// A GPU: the kernels, and lanes to run them in. All calls come from the thread of the engine's loop, whose
// current context stays the primary one.
#pragma once

#include "cuda_driver.h"
#include "device/launcher.h"
#include "kernels/cuda.h"
#include "lane_shares.h"
#include "launch_probe.h"
#include "pairs_ahead.h"
#include "retired_memory.h"

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace epd::device {

// For calls that must not fail. After such a failure this process can't use the GPU any more and ends
// (kExitDeviceFailed).
void cuda_must(const CudaDriver& driver, const char* what, CUresult result);

void set_last_word(std::function<void()> word);

// The number of queues from the host to the device that the engine asks the driver for, and the number of
// lanes that they allow. The other queues serve the control stream, the stream aside and the launch probe.
inline constexpr std::uint32_t kQueues = 32;
inline constexpr std::uint32_t kMaxLanes = 24;

// Streams in the device's primary context, which lanes use in turn. (In a green context operations would take
// turns of 200 us with the clients' kernels, also under MPS.)
class StreamPool {
 public:
  explicit StreamPool(const CudaDriver& driver) : driver_(driver) {}
  ~StreamPool();
  StreamPool(const StreamPool&) = delete;
  StreamPool& operator=(const StreamPool&) = delete;

  // Streams are used again and never destroyed. The driver assigns them, as they are made, to a limited
  // number of queues (kQueues). Two streams on one queue would wait for each other, whatever they do.
  CUstream take(int priority);
  void give_back(CUstream stream, int priority) { free_.emplace_back(priority, stream); }

 private:
  const CudaDriver& driver_;
  std::vector<std::pair<int, CUstream>> free_;
};

struct LaneMemory {
  CUdeviceptr device = 0;
  std::size_t device_bytes = 0;
  std::byte* host = nullptr;  // pinned
  std::size_t host_bytes = 0;
};

// The memory of lanes. It is used again and never freed: freeing waits for all streams, and one of them may
// wait for an operation that this engine has yet to launch.
class LaneMemoryPool {
 public:
  explicit LaneMemoryPool(const CudaDriver& driver) : driver_(driver) {}

  // RESOURCE_EXHAUSTED: the driver has none.
  Result<LaneMemory> take(std::size_t device_bytes, std::size_t host_bytes);
  void give_back(const LaneMemory& memory) { free_.push_back(memory); }

 private:
  const CudaDriver& driver_;
  std::vector<LaneMemory> free_;
};

class WorkerLane;

// A lane that has been destroyed, until the last kernel on its stream has ended.
struct LeavingLane {
  CUstream stream = nullptr;  // null: nothing runs there any more
  int stream_priority = 0;
  std::unique_ptr<PairsAhead> pairs;
  LaneMemory memory;
  CallPort::Layout calls;           // without words: it took no calls
  std::shared_ptr<Arena> exchange;  // kept while a look or a gate reads it
};

class CudaDevice final : public Device, public Launcher {
 public:
  static Result<std::unique_ptr<Device>> make(const DeviceName& name, const Clock& clock);
  ~CudaDevice() override;

  const std::string& name() const override { return name_; }
  std::uint32_t max_sms() const override { return shares_.max_sms(); }
  std::uint32_t num_sms() const override { return shares_.sms(); }
  DeviceTraits traits() const override { return {.has_streams = true, .memory_is_clear = false}; }
  void set_num_sms(std::uint32_t sms) override { shares_.set_sms(sms); }
  Result<std::unique_ptr<Arena>> map_arena(int fd, std::uint64_t bytes) override;
  Result<std::unique_ptr<Arena>> map_client_memory(std::span<const UniqueFd> pieces, std::uint64_t bytes,
                                                   bool here) override;
  Result<std::unique_ptr<Arena>> map_ipc_memory(const abi::MemoryRange& range, bool here) override;
  void retire(std::unique_ptr<Arena> memory, std::uint64_t bytes) override {
    retired_.add(std::move(memory), bytes);
  }
  Result<std::unique_ptr<Arena>> map_results(int fd, std::uint64_t bytes) override;
  Launcher& launcher() override { return *this; }
  void check() override;
  bool advance() override;
  std::uint32_t times_stuck() const override { return probe_->times_stuck(); }

  Result<std::unique_ptr<Lane>> open_lane(const LaneShape& shape) override;
  void read(void* to, const void* device, std::size_t bytes) override;
  void read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                 std::size_t rows) override;
  void write(void* device, const void* from, std::size_t bytes) override;
  void clear(void* device, std::size_t bytes) override;
  void close_calls(std::byte* words) override;

  // For lanes.
  const CudaDriver& driver() const { return driver_; }
  CUcontext context() const { return primary_; }
  CUstream control() const { return control_; }  // for work that must not wait for anything
  StreamPool& streams() { return streams_; }
  LaneMemoryPool& lane_memory() { return lane_memory_; }
  LaneShares& shares() { return shares_; }
  // A stream for work that may have to wait for SMs, or behind clients' copies. A lane's work there has ended
  // when see_off() is true.
  CUstream aside() const { return aside_; }
  // Does read_rows() in that stream, then stores `value` in `word`. `to` and `word` are pinned memory.
  void read_aside(void* to, const void* device, std::size_t bytes, std::size_t stride, std::size_t rows,
                  const std::uint32_t* word, std::uint32_t value);
  std::size_t max_shared_bytes() const { return max_shared_bytes_; }
  CUkernel kernel(const char* name) const;
  std::uint64_t now_ns() const { return clock_.now_ns(); }
  void take_leaving(LeavingLane lane) { leaving_.push_back(std::move(lane)); }
  // Ends this process, because something that the device can't do without has failed.
  [[noreturn]] void fail(const Status& status) const;
  bool is_idle(CUstream stream) const;

 private:
  CudaDevice(const CudaDriver& driver, CUdevice device, std::string name, const Clock& clock)
      : driver_(driver),
        device_(device),
        name_(std::move(name)),
        clock_(clock),
        streams_(driver),
        lane_memory_(driver),
        shares_(driver),
        retired_(driver) {}
  Status start(std::uint32_t max_sms);
  // True: the lane's stream has ended.
  bool see_off(LeavingLane& lane);
  void copy_rows(void* to, const void* device, std::size_t bytes, std::size_t stride, std::size_t rows,
                 CUstream stream) const;

  const CudaDriver& driver_;
  const CUdevice device_;
  const std::string name_;
  const Clock& clock_;
  std::size_t max_shared_bytes_ = 0;
  CUcontext primary_ = nullptr;  // lives until the process ends
  CUstream aside_ = nullptr;
  CUstream control_ = nullptr;
  StreamPool streams_;
  LaneMemoryPool lane_memory_;
  LaneShares shares_;
  std::vector<LeavingLane> leaving_;
  std::unique_ptr<LaunchProbe> probe_;
  RetiredMemory retired_;
  CUlibrary library_ = nullptr;
  std::array<CUkernel, std::size(kernels::cuda::kKernelNames)> kernels_{};
};

Result<std::unique_ptr<Device>> make_cuda_device(const DeviceName& name, const Clock& clock);

}  // namespace epd::device
