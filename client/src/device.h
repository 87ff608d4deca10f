// The library on a CUDA device: it maps arenas there, and makes streams write words and wait for
// them. Sessions on host devices have no Device. No CUDA type appears here, so the library also builds
// without cuda.h (cuda_missing.cpp).
//
// Threads: any thread may make any call at any time. No call leaves another context current in its thread.
#pragma once

#include "common/fd.h"
#include "epd/epd.h"
#include "proto/attach.h"
#include "proto/call_words.h"
#include "proto/mapped_memory.h"
#include "step.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace epd::client {

class DeviceMemory;
class DeviceEvent;

// An allocation of the application's, as the driver knows it. Or adjacent ones of cuMemCreate, all of one
// size, of which torch's expandable segments consist: its pieces.
struct Allocation {
  std::uintptr_t begin = 0;
  std::uint64_t bytes = 0;   // of all pieces
  std::uint32_t pieces = 0;  // 0: there is no memory of the driver's
  std::array<std::uint64_t, abi::kMaxPieces>
      ids{};  // by piece: never that of another allocation of this process

  bool operator==(const Allocation&) const = default;
  // Whether the bytes lie in both, in the same pieces.
  bool shares(const Allocation& other, std::uintptr_t address, std::uint64_t count) const {
    const auto within = [&](const Allocation& its) {
      return its.pieces != 0 && address >= its.begin && address - its.begin < its.bytes &&
             count <= its.bytes - (address - its.begin);
    };
    if (count == 0 || !within(*this) || !within(other)) return false;
    const std::uint64_t piece = bytes / pieces;
    if (other.bytes / other.pieces != piece) return false;
    for (std::uint64_t at = (address - begin) / piece; begin + at * piece < address + count; ++at) {
      const std::uintptr_t its_begin = begin + at * piece;
      if (its_begin < other.begin || (its_begin - other.begin) % piece != 0 ||
          other.ids[(its_begin - other.begin) / piece] != ids[at])
        return false;
    }
    return true;
  }
};

// Whether a graph that a stream captures, and all that was made of it to be launched, have ended.
using GraphEnd = std::shared_ptr<const std::atomic<bool>>;

// How a stream waits: epd_wait_by_t.
enum class WaitBy : std::uint32_t {
  kMemop = EPD_WAIT_BY_MEMOP,
  kKernel = EPD_WAIT_BY_KERNEL,
  kEvent = EPD_WAIT_BY_EVENT,  // a memory operation, and an event that is recorded behind it
};

class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  // Maps at least `bytes` of the exported allocation, read-write; the device must outlive `out`.
  virtual Status map(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) = 0;
  // The same for host memory, which this process reads.
  virtual Status map_host(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) = 0;
  // Ends a mapping of map() or map_host(). Only DeviceMemory calls it.
  virtual void unmap(std::uintptr_t address, std::size_t bytes) noexcept = 0;

  // The allocation in which the address lies, with the pieces behind it that the next `bytes` reach. Takes
  // 0.1 to 0.2 us for each piece (H200), and is allowed while streams capture.
  virtual Allocation allocation_of(std::uintptr_t address, std::uint64_t bytes) noexcept = 0;
  // How engines reach the allocation: sets `by`, `pieces`, and the handle or the descriptors.
  // INVALID_ARGUMENT: they can't.
  virtual Status export_memory(const Allocation& allocation, abi::MemoryRange& range,
                               std::vector<UniqueFd>& fds) = 0;

  // OK; UNSUPPORTED; or the error with which loading the library's kernels failed.
  virtual Status has_kernels() const = 0;
  // OK, or the error after which nothing runs in the context.
  virtual Status check() = 0;
  // Whether the stream captures a graph. Fails if it is no stream, as far as the driver can tell.
  virtual Status check_stream(void* stream, bool& captures) = 0;

  // Tells of the end of the graph that the stream captures: the same for all calls in one capture.
  virtual Status follow_graph(void* stream, GraphEnd& out) = 0;

  // These enqueue in the caller's stream. They return at once, unless its queue is full.
  virtual Status wait(void* stream, std::uintptr_t flag) = 0;  // by a memory operation, until it is 1
  // The step, by one kernel, which has the name of the kind of operation. After has_kernels().
  virtual Status launch(void* stream, abi::Op op, const stream_kernels::StagedStep& step) = 0;

  // An event of this process without timing, which other processes may open. The device must outlive `out`.
  virtual Status make_event(DeviceEvent& out) = 0;
  // Ends what make_event() made. Only DeviceEvent calls it.
  virtual void destroy_event(void* event) noexcept = 0;
  // These enqueue too. The event completes with the stream's work so far; a stream waits for that.
  virtual Status record(void* stream, void* event) = 0;
  virtual Status wait_event(void* stream, void* event) = 0;

  // Makes a call of the host: copies it to its place in abi::CallWords, in the library's stream. Needs no SM.
  virtual Status call(std::uintptr_t place, const abi::PackedCall& call) = 0;

  // Writes by a memory operation in the library's stream, which waits for no other.
  virtual Status write_aside(std::uintptr_t word, std::uint32_t value) = 0;
  // Returns when all write_aside before it are done.
  virtual Status finish_aside() = 0;
  // Reads the words after all earlier write_aside. Returns when they are here.
  virtual Status read_aside(std::uintptr_t from, std::span<std::uint32_t> words) = 0;
  // Returns when all work in the context has run, or can't run any more.
  virtual void synchronize() noexcept = 0;
};

// An owned mapping of device memory.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device& device, std::uintptr_t address, std::size_t bytes)
      : device_(&device), address_(address), bytes_(bytes) {}
  DeviceMemory(DeviceMemory&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), address_(other.address_), bytes_(other.bytes_) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceMemory() {
    if (device_ != nullptr) device_->unmap(address_, bytes_);
  }

  std::uintptr_t address() const { return address_; }

 private:
  Device* device_ = nullptr;
  std::uintptr_t address_ = 0;
  std::size_t bytes_ = 0;
};

// An owned event.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  DeviceEvent(Device& device, void* event) : device_(&device), event_(event) {}
  DeviceEvent(DeviceEvent&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), event_(other.event_) {}
  DeviceEvent& operator=(DeviceEvent&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~DeviceEvent() {
    if (device_ != nullptr) device_->destroy_event(event_);
  }

  void* get() const { return event_; }

 private:
  Device* device_ = nullptr;
  void* event_ = nullptr;
};

// The GPUs that this process sees. UNSUPPORTED: as of open_cuda_device.
Status visible_gpus(std::vector<abi::GpuUuid>& out);

// Opens the CUDA device that the daemon named, by its UUID: numbers differ under CUDA_VISIBLE_DEVICES. Its
// context is the calling thread's current one if that is on the device, else the primary one. UNSUPPORTED: no
// driver, or the library was built without cuda.h. INVALID_ARGUMENT: this process does not see the device.
Status open_cuda_device(const abi::Welcome& welcome, std::unique_ptr<Device>& out);

}  // namespace epd::client
