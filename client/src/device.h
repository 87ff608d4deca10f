// What the library does on a device whose memory is not the host's: it maps an arena there, and lets streams
// write and wait for words in it. Sessions on host devices have none. No CUDA type appears here, so that the
// library also builds without CUDA's header (cuda_missing.cpp).
//
// Threads: any thread may call anything at any time. No call leaves another context current in its thread.
#pragma once

#include "proto/attach.h"
#include "shared_memory.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace epd::client {

class DeviceMemory;

class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  // Maps at least `bytes` of the exported allocation, read-write; the device must outlive `out`.
  virtual Status map(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) = 0;
  // Of map(); only DeviceMemory calls it.
  virtual void unmap(std::uintptr_t address, std::size_t bytes) noexcept = 0;

  // Enqueue in a stream of the caller's. They return at once, unless its queue is full.
  virtual Status write(void* stream, std::uintptr_t word, std::uint32_t value) = 0;
  // What comes after waits until the word is `value` or up to 2^31 - 1 further.
  virtual Status wait(void* stream, std::uintptr_t word, std::uint32_t value) = 0;

  // Like write, in a stream of the library's that waits for no other.
  virtual Status write_aside(std::uintptr_t word, std::uint32_t value) = 0;
  // Returns when all write_aside before it are done.
  virtual Status finish_aside() = 0;
  // Returns when everything enqueued in the context has run, or can't any more.
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

// The CUDA device that the daemon named, by its uuid: numbers differ where CUDA_VISIBLE_DEVICES does. Its
// context is the calling thread's current one if that is on the device, else the primary one. UNSUPPORTED: no
// driver here, or the library was built without cuda.h. INVALID_ARGUMENT: the device is not visible here.
Status open_cuda_device(const abi::Welcome& welcome, std::unique_ptr<Device>& out);

}  // namespace epd::client
