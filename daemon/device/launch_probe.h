// Notices that a GPU begins no kernel for a while: calls wait then. The probe has a thread of its own,
// because the engine's loop may itself be waiting for the GPU.
#pragma once

#include "common/status.h"
#include "cuda_driver.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

namespace epd::device {

class LaunchProbe {
 public:
  // `kernel` does nothing. INTERNAL: the driver refuses a stream, or the system a thread.
  static Result<std::unique_ptr<LaunchProbe>> make(const CudaDriver& driver, CUcontext context,
                                                   CUkernel kernel);
  ~LaunchProbe();
  LaunchProbe(const LaunchProbe&) = delete;
  LaunchProbe& operator=(const LaunchProbe&) = delete;

  // Whether the device has lanes. The probe is launched only then.
  void watch(bool in_use);
  // How often no kernel has begun for 100 ms.
  std::uint32_t times_stuck() const { return times_stuck_.load(std::memory_order_relaxed); }

 private:
  LaunchProbe(const CudaDriver& driver, CUcontext context, CUkernel kernel)
      : driver_(driver), context_(context), kernel_(kernel) {}

  void run();
  // False: the thread is to end.
  bool sleep();
  // Logs the first call that the driver refuses.
  bool went_well(const char* call, CUresult result);
  bool launch();
  // Whether the probe that launch() launched has run, or the driver gives no answer.
  bool has_run();

  const CudaDriver& driver_;
  const CUcontext context_;
  const CUkernel kernel_;
  CUstream stream_ = nullptr;
  std::atomic<std::uint32_t> times_stuck_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool in_use_ = false;       // guarded by mutex_
  bool end_ = false;          // guarded by mutex_
  std::string_view refused_;  // used by the thread: the call that was refused last; empty once it succeeds
  std::thread thread_;
};

}  // namespace epd::device
