#include "launch_probe.h"

#include "base/clock.h"
#include "base/log.h"

#include <pthread.h>
#include <chrono>
#include <exception>
#include <utility>

namespace epd::device {

namespace {

constexpr std::uint64_t kBetweenNs = 50'000'000;
// A launch probe normally runs within microseconds.
constexpr std::uint64_t kPatienceNs = 100'000'000;

}  // namespace

Result<std::unique_ptr<LaunchProbe>> LaunchProbe::make(const CudaDriver& driver, CUcontext context,
                                                       CUkernel kernel) {
  std::unique_ptr<LaunchProbe> probe(new LaunchProbe(driver, context, kernel));
  int least = 0;
  int greatest = 0;
  CUresult result = driver.cuCtxGetStreamPriorityRange(&least, &greatest);
  if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuCtxGetStreamPriorityRange", result));
  result = driver.cuStreamCreateWithPriority(&probe->stream_, CU_STREAM_NON_BLOCKING, greatest);
  if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuStreamCreateWithPriority", result));
  try {
    probe->thread_ = std::thread([raw = probe.get()] { raw->run(); });
  } catch (const std::exception& error) {
    return internal_error(std::string("no thread for the probe: ") + error.what());
  }
  return probe;
}

// The stream is not destroyed: that would wait for what is stuck.
LaunchProbe::~LaunchProbe() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void LaunchProbe::watch(bool in_use) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(in_use_, in_use) == in_use) return;
  }
  wake_.notify_one();
}

bool LaunchProbe::sleep() {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, std::chrono::nanoseconds(kBetweenNs), [this] { return end_; });
  return !end_;
}

bool LaunchProbe::went_well(const char* call, CUresult result) {
  if (result == CUDA_SUCCESS) {
    if (refused_ == call) refused_ = {};
    return true;
  }
  if (std::exchange(refused_, call) != call)
    log_event(LogLevel::kWarning, "the probe was refused", {{"error", driver_.describe(call, result)}});
  return false;
}

bool LaunchProbe::launch() {
  return went_well("cuLaunchKernel", driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel_), 1, 1, 1, 1,
                                                            1, 1, 0, stream_, nullptr, nullptr));
}

bool LaunchProbe::has_run() {
  const CUresult state = driver_.cuStreamQuery(stream_);
  if (state == CUDA_ERROR_NOT_READY) return false;
  went_well("cuStreamQuery", state);
  return true;
}

// A refused call is tried again. The engine's loop notices a device that has failed, and ends the process.
void LaunchProbe::run() {
  ::pthread_setname_np(::pthread_self(), "epd-probe");
  const MonotonicClock clock;
  while (!went_well("cuCtxSetCurrent", driver_.cuCtxSetCurrent(context_))) {
    if (!sleep()) return;
  }
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return in_use_ || end_; });
      if (end_) return;
    }
    const bool launched = launch();
    const std::uint64_t launched_ns = clock.now_ns();
    if (!sleep()) return;
    if (!launched) continue;
    for (bool counted = false; !has_run();) {
      if (!counted && clock.now_ns() - launched_ns >= kPatienceNs) {
        counted = true;
        times_stuck_.fetch_add(1, std::memory_order_relaxed);
      }
      if (!sleep()) return;
    }
  }
}

}  // namespace epd::device
