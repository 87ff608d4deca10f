// The engine's view of a device: memory that ranks share, and somewhere to run the operations (Launcher). The
// engine knows only this and launcher.h.
//
// Threads: every call comes from the engine's loop. `notify` (given at creation) may be called from
// any thread, when work finishes that the loop has not seen finish.
#pragma once

#include "base/clock.h"
#include "common/fd.h"
#include "common/status.h"
#include "device/name.h"
#include "proto/mapped_memory.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace epd::device {

class Launcher;

// A mapping of an arena. The address is one of the device's memory: only that of a host device may be read
// here.
class Arena {
 public:
  virtual ~Arena() = default;
  std::byte* bytes() const { return base_; }
  // For an arena that is no longer used: unmaps that many bytes from its end. True: destroying the rest is
  // quick.
  virtual bool give_back(std::uint64_t /*bytes*/) { return true; }

 protected:
  explicit Arena(std::byte* base) : base_(base) {}

 private:
  std::byte* base_;
};

// How kinds of devices differ, as far as the engine has to know.
struct DeviceTraits {
  bool has_streams = false;     // clients' streams call operations; a client may take the device along
  bool memory_is_clear = true;  // a new arena is zeroed; else it may hold anything
};

class Device {
 public:
  virtual ~Device() = default;

  virtual const std::string& name() const = 0;
  virtual std::uint32_t max_sms() const = 0;
  virtual std::uint32_t num_sms() const = 0;
  virtual DeviceTraits traits() const = 0;
  // Clamped to 1 .. max_sms(). Takes effect with the next chunk (host) or operation (CUDA).
  virtual void set_num_sms(std::uint32_t sms) = 0;

  // Ends the process (kExitDeviceFailed) if the device has failed. Needed because a failure does not show
  // while nothing runs.
  virtual void check() {}

  // Continues the device's own work, which must not block the loop: for example, a lane that was closed goes
  // when its kernels have run. True while some of it is under way, because no bell rings at its end.
  virtual bool advance() { return false; }
  // Carries out calls on the calling thread, for a moment. Host devices do. True: there was something to do.
  virtual bool run() { return false; }
  // Whether run() would find something to do.
  virtual bool runnable() const { return false; }
  // How often the device began no kernel for 100 ms.
  virtual std::uint32_t times_stuck() const { return 0; }

  virtual Result<std::unique_ptr<Arena>> map_arena(int fd, std::uint64_t bytes) = 0;
  // Maps the first `bytes` of each piece of a client's own memory, one after the other, through descriptors
  // that check_client_memory() accepted. `here`: it must be memory of this device. INVALID_ARGUMENT: it can't
  // be used. UNSUPPORTED: the device maps none. The text continues "memory ...".
  virtual Result<std::unique_ptr<Arena>> map_client_memory(std::span<const UniqueFd> /*pieces*/,
                                                           std::uint64_t /*bytes*/, bool /*here*/) {
    return maps_none();
  }

  // Maps memory of cudaMalloc that another process has exported. `here`, the text and its codes as above.
  // RESOURCE_EXHAUSTED: too much waits to be unmapped, or memory that was freed at the same address does.
  virtual Result<std::unique_ptr<Arena>> map_ipc_memory(const abi::MemoryRange& /*range*/, bool /*here*/) {
    return maps_none();
  }
  // Unmaps memory of so many bytes that kernels may still use: when none can any more.
  virtual void retire(std::unique_ptr<Arena> /*memory*/, std::uint64_t /*bytes*/) {}

  // Maps what make_results_memory() made. This process reads it too. For devices whose operations are calls.
  virtual Result<std::unique_ptr<Arena>> map_results(int fd, std::uint64_t bytes) = 0;

  virtual Launcher& launcher() = 0;

 private:
  Status maps_none() const {
    return {StatusCode::kUnsupported, "of a process's own can't be mapped on " + name()};
  }
};

// Sets what is called when the process ends because its device has failed (kExitDeviceFailed) and nothing
// runs on it any more. To be set before make_device().
void on_device_failed(std::function<void()> last_word);

// INVALID_ARGUMENT: the name is not understood. UNSUPPORTED: the GPU can't be used. The clock must outlive
// the device.
Result<std::unique_ptr<Device>> make_device(const std::string& name, const Clock& clock,
                                            std::function<void()> notify);

}  // namespace epd::device
