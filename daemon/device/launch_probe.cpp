#include "launch_probe.h"

#include "base/clock.h"
#include "base/log.h"

#include <pthread.h>
#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace epd::device {

namespace {

constexpr std::uint64_t kBetweenNs = 50'000'000;
// A launch probe normally runs within microseconds. But clients' kernels may hold all other SMs for long.
// Then it waits for one of their CTAs, and yielding does not help. So the patience doubles each time that the
// probe does not run soon after kernels were told to yield, and halves after each quiet period.
constexpr std::uint64_t kPatienceNs = 100'000'000;
constexpr std::uint64_t kMostPatienceNs = 6'400'000'000;
constexpr std::uint64_t kSoonNs = 100'000'000;
constexpr std::uint64_t kQuietNs = 10'000'000'000;
// The interval of looks while the GPU is stuck. The probe runs as soon as the last kernel has left, two
// milliseconds after it was told.
constexpr std::uint64_t kLookNs = 500'000;

}  // namespace

Result<std::unique_ptr<LaunchProbe>> LaunchProbe::make(const CudaDriver& driver, CUcontext context,
                                                       CUkernel kernel, std::function<void()> notify) {
  std::unique_ptr<LaunchProbe> probe(new LaunchProbe(driver, context, kernel, std::move(notify)));
  int least = 0;
  int greatest = 0;
  CUresult result = driver.cuCtxGetStreamPriorityRange(&least, &greatest);
  if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuCtxGetStreamPriorityRange", result));
  result = driver.cuStreamCreateWithPriority(&probe->stream_, CU_STREAM_NON_BLOCKING, greatest);
  if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuStreamCreateWithPriority", result));
  void* word = nullptr;
  result = driver.cuMemHostAlloc(&word, sizeof(std::uint32_t), CU_MEMHOSTALLOC_PORTABLE);
  if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuMemHostAlloc", result));
  probe->yield_epoch_ = static_cast<std::uint32_t*>(word);
  *probe->yield_epoch_ = 0;
  try {
    probe->thread_ = std::thread([raw = probe.get()] { raw->run(); });
  } catch (const std::exception& error) {
    return internal_error(std::string("no thread for the probe: ") + error.what());
  }
  return probe;
}

// Stream and word are not freed: freeing them would wait for what is stuck.
LaunchProbe::~LaunchProbe() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void LaunchProbe::watch(bool staying) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(staying_, staying) == staying) return;
  }
  wake_.notify_one();
}

bool LaunchProbe::sleep(std::uint64_t ns) {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, std::chrono::nanoseconds(ns), [this] { return end_; });
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

void LaunchProbe::begin_yield() {
  stuck_.store(true, std::memory_order_release);
  std::atomic_ref(*yield_epoch_).fetch_add(1, std::memory_order_acq_rel);
  changes_.fetch_add(1, std::memory_order_acq_rel);
  notify_();
}

void LaunchProbe::end_yield() {
  stuck_.store(false, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_acq_rel);
  notify_();
}

// A refused call is tried again. The engine's loop notices a device that has failed, and ends the process.
void LaunchProbe::run() {
  ::pthread_setname_np(::pthread_self(), "epd-probe");
  const MonotonicClock clock;
  while (!went_well("cuCtxSetCurrent", driver_.cuCtxSetCurrent(context_))) {
    if (!sleep(kBetweenNs)) return;
  }
  std::uint64_t patience_ns = kPatienceNs;
  std::uint64_t quiet_since_ns = clock.now_ns();
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return staying_ || end_; });
      if (end_) return;
    }
    if (!launch()) {
      if (!sleep(kBetweenNs)) return;
      continue;
    }
    const std::uint64_t launched_ns = clock.now_ns();
    if (launched_ns - quiet_since_ns >= kQuietNs) {
      patience_ns = std::max(patience_ns / 2, kPatienceNs);
      quiet_since_ns = launched_ns;
    }
    if (!sleep(kBetweenNs)) return;
    std::uint64_t told_ns = 0;
    while (!has_run()) {
      if (!stuck() && clock.now_ns() - launched_ns >= patience_ns) {
        told_ns = clock.now_ns();
        begin_yield();
      }
      if (!sleep(stuck() ? kLookNs : kBetweenNs)) return;
    }
    if (!stuck()) continue;
    quiet_since_ns = clock.now_ns();
    if (quiet_since_ns - told_ns > kSoonNs) patience_ns = std::min(2 * patience_ns, kMostPatienceNs);
    end_yield();
  }
}

}  // namespace epd::device
