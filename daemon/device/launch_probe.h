// Notices that a GPU begins no kernel any more while a resident kernel runs, and tells the resident kernels
// to yield: the README of this room, "Yielding". The probe has a thread of its own, because the engine's loop
// may be waiting for the GPU itself.
#pragma once

#include "common/status.h"
#include "cuda_driver.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

namespace epd::device {

class LaunchProbe {
 public:
  // `kernel`: one that does nothing. `notify` is called on another thread, with every change. INTERNAL: the
  // driver refuses a stream or memory.
  static Result<std::unique_ptr<LaunchProbe>> make(const CudaDriver& driver, CUcontext context,
                                                   CUkernel kernel, std::function<void()> notify);
  ~LaunchProbe();
  LaunchProbe(const LaunchProbe&) = delete;
  LaunchProbe& operator=(const LaunchProbe&) = delete;

  // Whether a resident kernel runs. The probe is launched only then.
  void watch(bool staying);
  // Changes when kernels that began before are to leave; and where they see that, in pinned memory.
  std::uint32_t yield_epoch() const { return std::atomic_ref(*yield_epoch_).load(std::memory_order_acquire); }
  const std::uint32_t* yield_epoch_word() const { return yield_epoch_; }
  // Since the last round began no kernel has.
  bool stuck() const { return stuck_.load(std::memory_order_acquire); }
  std::uint32_t changes() const { return changes_.load(std::memory_order_acquire); }  // of these

 private:
  LaunchProbe(const CudaDriver& driver, CUcontext context, CUkernel kernel, std::function<void()> notify)
      : driver_(driver), context_(context), kernel_(kernel), notify_(std::move(notify)) {}

  void run();
  // False: to end.
  bool sleep(std::uint64_t ns);
  // Logs the first call that the driver refuses.
  bool went_well(const char* call, CUresult result);
  bool launch();
  // That of launch(), or the driver does not say.
  bool has_run();
  void begin_round();
  void end_round();

  const CudaDriver& driver_;
  const CUcontext context_;
  const CUkernel kernel_;
  CUstream stream_ = nullptr;
  std::uint32_t* yield_epoch_ = nullptr;
  const std::function<void()> notify_;
  std::atomic<bool> stuck_{false};
  std::atomic<std::uint32_t> changes_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool staying_ = false;      // guarded by mutex_
  bool end_ = false;          // guarded by mutex_
  std::string_view refused_;  // the thread's: the call that was refused last, until it is not
  std::thread thread_;
};

}  // namespace epd::device
