// What the library does on a device whose memory is not the host's: it maps an arena there, and lets streams
// write and wait for words in it. Sessions on host devices have none. No CUDA type appears here, so that the
// library also builds without CUDA's header (cuda_missing.cpp).
//
// Threads: any thread may call anything at any time. No call leaves another context current in its thread.
#pragma once

#include "common/fd.h"
#include "proto/attach.h"
#include "proto/call_words.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace epd::client {

class DeviceMemory;

// How a stream writes and awaits words: epd_wait_by_t.
enum class WaitBy : std::uint32_t { kMemop = EPD_WAIT_BY_MEMOP, kKernel = EPD_WAIT_BY_KERNEL };

// Until the word is `value` or up to 2^31 - 1 further.
struct StreamWait {
  std::uintptr_t word = 0;
  std::uint32_t value = 0;
  std::uint64_t limit_ns = 0;  // a kernel goes on after this whatever the word is; a memory operation can't
};

// A call for the engine's kernel, see abi::CallWords.
struct StreamCall {
  std::uintptr_t words = 0;
  abi::Call call;                    // but for number and epoch
  std::uintptr_t num_tokens_at = 0;  // not 0: in place of call.num_tokens
  bool waits = false;                // the kernel waits for the call's end itself
  std::uint64_t limit_ns = 0;        // at most so long
};

class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  // Maps at least `bytes` of the exported allocation, read-write; the device must outlive `out`.
  virtual Status map(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) = 0;
  // Likewise memory of the host, which this process reads.
  virtual Status map_host(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) = 0;
  // Of map(); only DeviceMemory calls it.
  virtual void unmap(std::uintptr_t address, std::size_t bytes) noexcept = 0;

  // OK, or UNSUPPORTED, or why the kernels could not be loaded.
  virtual Status can_wait_by(WaitBy by) const = 0;
  // OK, or the error after which nothing runs in the context any more.
  virtual Status check() = 0;
  // Whether it is a stream, and captures. Not all that is none can be told.
  virtual Status check_stream(void* stream, bool& captures) = 0;

  // Enqueue in a stream of the caller's. They return at once, unless its queue is full.
  virtual Status write(void* stream, std::uintptr_t word, std::uint32_t value, WaitBy by) = 0;
  virtual Status wait(void* stream, const StreamWait& wait, WaitBy by) = 0;
  // Both by one kernel: the value that it waits for is written to `word` first.
  virtual Status write_and_wait(void* stream, std::uintptr_t word, const StreamWait& wait) = 0;

  // Enqueue as well, and are legal in a stream that captures: a kernel that rings the call, and one that
  // waits for the end of the last call on the slot. After can_wait_by(kKernel).
  virtual Status call(void* stream, const StreamCall& call) = 0;
  virtual Status await_call(void* stream, std::uintptr_t words, std::uint32_t slot,
                            std::uint64_t limit_ns) = 0;

  // A call of the host's, to its place in abi::CallWords: a copy in the stream aside, which needs no SM.
  virtual Status call(std::uintptr_t place, const abi::PackedCall& call) = 0;

  // A memory operation in a stream of the library's that waits for no other.
  virtual Status write_aside(std::uintptr_t word, std::uint32_t value) = 0;
  // Returns when all write_aside before it are done.
  virtual Status finish_aside() = 0;
  // Behind all write_aside before it; returns with the words.
  virtual Status read_aside(std::uintptr_t from, std::span<std::uint32_t> words) = 0;
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
