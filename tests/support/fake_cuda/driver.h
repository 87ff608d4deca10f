// The common parts of the fake driver: settings, devices, contexts, and the way into every call.
#pragma once

#include "fake_cuda/api.h"
#include "fake_cuda/staying.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace epd::fake_cuda {

class Stream;

inline constexpr unsigned kNumSms = 132;

// The n-th call of a function fails.
struct Fault {
  std::string function;
  std::uint64_t call = 0;
  CUresult error = CUDA_SUCCESS;
  static constexpr int kAnyDevice = -1;  // or none
  static constexpr int kWithoutContext = -2;
  int device = kAnyDevice;  // of the calling thread's context
  std::uint64_t calls = 0;
};

// The file `fail` of the folder of faults. Each process counts its calls by itself.
struct FaultFile {
  std::string path;  // empty: none is looked for
  std::uint64_t inode = 0;
  std::int64_t written_ns = 0;
  std::uint64_t calls = 0;
};

// From the environment, read once by cuInit. See README.md.
struct Settings {
  std::vector<int> devices;  // that this process sees: their numbers on the machine
  bool mps = true;
  bool host_numa = true;       // memory of the host by descriptors
  int shared_memory = 232448;  // bytes that a block may ask for
  std::string fault_dir;
  std::vector<std::pair<int, int>> apart;  // devices of the machine without P2P
  std::vector<Fault> faults;               // guarded by Driver::mutex

  static Settings from_environment();
};

// A device as this process sees it. Its error ends every context of the process on it.
struct Device {
  int ordinal = 0;  // in this process
  int machine = 0;  // on the machine
  std::atomic<int> contexts{0};
  std::mutex staying_mutex;
  std::vector<StayingKernel> staying;  // guarded by staying_mutex
  std::atomic<CUresult> error{CUDA_SUCCESS};
  std::string fault_file;  // empty: none is looked for
  std::string busy_file;   // likewise
  std::string stuck_file;  // likewise
  std::string held_file;   // likewise
  std::string taken_file;  // likewise

  // Also looks for the fault file.
  CUresult check();
  // Whether this process may have another context here.
  CUresult admit() const;
  // Whether kernels of the name begin, and words that streams write are written.
  bool begins(const std::string& kernel) const;
  bool writes_words() const;
  // A kernel holds SMs, whole ones, until it gives them back. False: too few are free.
  bool take_sms(const StayingKernel& kernel);
  void give_sms(const StayingKernel& kernel);
  void fail(CUresult result);
};

struct Context {
  Context(Device& on, unsigned sms) : device(on), num_sms(sms) { ++device.contexts; }
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Device& device;
  const unsigned num_sms;
  bool primary = false;
  std::mutex mutex;
  std::vector<std::shared_ptr<Stream>> streams;  // guarded by mutex; blocking and non-blocking ones
  std::shared_ptr<Stream> default_stream;        // guarded by mutex; null until it is used
};

// Objects behind handles. A handle that is not in its table is refused.
template <typename T>
class Table {
 public:
  T* add(std::shared_ptr<T> object) {
    T* const handle = object.get();
    const std::lock_guard lock(mutex_);
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  std::shared_ptr<T> find(const void* handle) const {
    const std::lock_guard lock(mutex_);
    const auto at = objects_.find(handle);
    return at == objects_.end() ? nullptr : at->second;
  }
  std::shared_ptr<T> remove(const void* handle) {
    const std::lock_guard lock(mutex_);
    const auto at = objects_.find(handle);
    if (at == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(at->second);
    objects_.erase(at);
    return object;
  }
  template <typename Visit>
  void visit(Visit visit) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, object] : objects_) visit(*object);
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return objects_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<T>> objects_;
};

struct Primary {
  std::shared_ptr<Context> context;
  unsigned retained = 0;
};

struct Driver {
  Settings settings;
  int process = 0;  // that called cuInit: a fork of it is refused, as by the true driver
  std::vector<std::unique_ptr<Device>> devices;
  Table<Context> contexts;
  std::mutex mutex;
  std::vector<Primary> primaries;  // guarded by mutex; [devices]
  FaultFile fault_file;            // guarded by mutex, but for the path
  std::atomic<std::size_t> faults{0};

  Device* device(CUdevice ordinal) {
    return ordinal < 0 || static_cast<std::size_t>(ordinal) >= devices.size() ? nullptr
                                                                              : devices[ordinal].get();
  }
};
// Whether a device may map the memory of another; numbers of this process.
bool can_reach(CUdevice device, CUdevice peer);
// Null before cuInit. Never destroyed: threads of streams live until the process ends.
Driver* driver();

// The conditions of a call, besides an initialised driver.
enum class Needs { kNothing, kContext };

// Each call begins with this: counts it, fails it if it is to fail, and refuses it without a context or on a
// device that has faulted. `function` as cuda.h spells it, without a version.
CUresult enter(const char* function, Needs needs);

// The calling thread's; null if there is none, or if it is destroyed.
std::shared_ptr<Context> current_context();
void make_current(const std::shared_ptr<Context>& context);

// A line on stderr: what a true device would only call an illegal address.
void complain(const std::string& text);

}  // namespace epd::fake_cuda
