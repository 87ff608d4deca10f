// Notices that a GPU begins no kernel any more while a resident kernel runs, and tells the resident kernels
// to yield: see "Yielding" in the README of this room. The probe has a thread of its own, because the
// engine's loop may itself be waiting for the GPU.
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
  // `kernel` does nothing. `notify` is called on another thread, at every change. INTERNAL: the driver
  // refuses a stream or memory.
  static Result<std::unique_ptr<LaunchProbe>> make(const CudaDriver& driver, CUcontext context,
                                                   CUkernel kernel, std::function<void()> notify);
  ~LaunchProbe();
  LaunchProbe(const LaunchProbe&) = delete;
  LaunchProbe& operator=(const LaunchProbe&) = delete;

  // Whether a resident kernel runs. The probe is launched only then.
  void watch(bool staying);
  // The yield epoch. It changes when kernels that began before are to leave. The second function says where
  // kernels read it, in pinned memory.
  std::uint32_t yield_epoch() const { return std::atomic_ref(*yield_epoch_).load(std::memory_order_acquire); }
  const std::uint32_t* yield_epoch_word() const { return yield_epoch_; }
  // No kernel has begun since the yield epoch changed last.
  bool stuck() const { return stuck_.load(std::memory_order_acquire); }
  std::uint32_t changes() const { return changes_.load(std::memory_order_acquire); }  // of stuck()

 private:
  LaunchProbe(const CudaDriver& driver, CUcontext context, CUkernel kernel, std::function<void()> notify)
      : driver_(driver), context_(context), kernel_(kernel), notify_(std::move(notify)) {}

  void run();
  // False: the thread is to end.
  bool sleep(std::uint64_t ns);
  // Logs the first call that the driver refuses.
  bool went_well(const char* call, CUresult result);
  bool launch();
  // Whether the probe that launch() launched has run, or the driver gives no answer.
  bool has_run();
  void begin_yield();
  void end_yield();

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
  std::string_view refused_;  // used by the thread: the call that was refused last; empty once it succeeds
  std::thread thread_;
};

}  // namespace epd::device
