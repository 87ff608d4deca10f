// What an engine needs of a device: memory that ranks share, and somewhere to run the operations (Launcher).
// The engine knows only this and launcher.h.
//
// Threads: every call comes from the engine's loop. `notify` (given at creation) may be called from
// any thread, when work finishes that the loop has not seen finish, and with has_news().
#pragma once

#include "base/clock.h"
#include "common/status.h"
#include "device/name.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace epd::device {

class Launcher;

// A mapping of an arena. The address is of the device's memory: only a host device's may be read here.
class Arena {
 public:
  virtual ~Arena() = default;
  std::byte* bytes() const { return base_; }
  // Of one that nobody uses any more: unmaps so many bytes from its end. True: what is left goes at once.
  virtual bool give_back(std::uint64_t /*bytes*/) { return true; }

 protected:
  explicit Arena(std::byte* base) : base_(base) {}

 private:
  std::byte* base_;
};

// What differs between kinds of devices, as far as the engine has to know.
struct DeviceTraits {
  bool has_streams = false;  // of clients, which wait for operations or ask for them, and may take it along
  bool memory_is_clear = true;  // a new arena's. Else it may hold anything
};

class Device {
 public:
  virtual ~Device() = default;

  virtual const std::string& name() const = 0;
  virtual std::uint32_t max_sms() const = 0;
  virtual std::uint32_t num_sms() const = 0;
  virtual DeviceTraits traits() const = 0;
  // Clamped to 1 .. max_sms(); takes effect with the next chunk (host) or operation (CUDA).
  virtual void set_num_sms(std::uint32_t sms) = 0;

  // Ends the process (kExitDeviceFailed) if the device has failed, which does not show while nothing runs on
  // it.
  virtual void check() {}

  // Goes on with what it does by itself and must not block the loop: resident kernels are started anew when
  // their share of SMs changes. True while some of it is under way: nobody rings at its end.
  virtual bool advance() { return false; }
  // Of resident kernels and were told to stop: microseconds from then until advance() saw that they had,
  // with what they still had to end. Those since the last call.
  virtual std::vector<std::uint32_t> take_kernel_stops() { return {}; }
  // How often the device began nothing any more, and resident kernels have yielded.
  virtual std::uint32_t times_stuck() const { return 0; }
  // Something has changed since advance(); `notify` has been called, or is about to be.
  virtual bool has_news() const { return false; }

  virtual Result<std::unique_ptr<Arena>> map_arena(int fd, std::uint64_t bytes) = 0;
  // The first `bytes` of a client's own memory, through a descriptor that may be anything which
  // check_client_memory lets pass. `here`: it must be memory of this device. What can't be used is
  // INVALID_ARGUMENT, with a text that goes on after "the memory that ... is bound to".
  virtual Result<std::unique_ptr<Arena>> map_client_memory(int fd, std::uint64_t bytes, bool here) = 0;

  // make_results_memory()'s, which this process reads too. Of devices whose kernels are resident.
  virtual Result<std::unique_ptr<Arena>> map_results(int fd, std::uint64_t bytes) = 0;

  virtual Launcher& launcher() = 0;
};

// How a GPU runs operations. Host devices know no difference.
enum class LaunchMode {
  kLaunched,  // one kernel for each: SMs are taken while it runs
  kResident,  // a kernel is resident on the SMs, and clients call it: no engine in the path
};

// Called as the process ends because its device has failed (kExitDeviceFailed) and runs nothing of it any
// more. To be set before make_device.
void on_device_failed(std::function<void()> last_word);

// INVALID_ARGUMENT for a name that is not understood; UNSUPPORTED for a GPU that can't be used. The clock
// outlives the device.
Result<std::unique_ptr<Device>> make_device(const std::string& name, LaunchMode mode, const Clock& clock,
                                            std::function<void()> notify);

}  // namespace epd::device
