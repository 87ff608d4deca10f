// Keeps pairs of a gate and a main kernel enqueued in a lane's stream, each after a wait for the lane's
// bell. A thread does this, because a launch blocks while the stream's queue is full.
#pragma once

#include "cuda_driver.h"
#include "kernels/workers.h"

#include <atomic>
#include <memory>
#include <thread>

namespace epd::device {

// The kernels of a pair, and how they are launched.
struct PairKernels {
  CUcontext context = nullptr;
  CUkernel gate = nullptr;
  CUkernel main = nullptr;
  std::uint32_t main_shared_bytes = 0;
};

class PairsAhead {
 public:
  // Between kBatch and twice as many pairs are enqueued. A queue takes some 340, and the thread takes a
  // millisecond to wake up.
  static constexpr std::uint32_t kBatch = 128;

  // The stream must outlive it. INTERNAL: the driver gives no events, or the system no thread.
  static Result<std::unique_ptr<PairsAhead>> make(const CudaDriver& driver, CUstream stream,
                                                  const PairKernels& kernels,
                                                  const kernels::WorkerArguments& arguments);
  // After end(), when the stream has run all pairs.
  ~PairsAhead();
  PairsAhead(const PairsAhead&) = delete;
  PairsAhead& operator=(const PairsAhead&) = delete;

  // Sets WorkerArguments::ctas and asked_sms of the pairs that are enqueued from now on.
  void set_sms(std::uint32_t ctas, std::uint32_t asked) {
    ctas_.store(ctas, std::memory_order_relaxed);
    asked_.store(asked, std::memory_order_relaxed);
  }
  // No further pair is enqueued. Those that are there still have to run.
  void end();
  // The same until go_on().
  void pause() { paused_.store(true, std::memory_order_relaxed); }
  void go_on();
  // The thread has noticed a pause. It enqueues nothing until go_on() or end().
  bool is_paused() const { return stands_.load(std::memory_order_acquire); }
  // The thread has ended: it enqueues nothing any more.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // A call of the thread's that the driver has refused; null: none. The thread has ended then.
  const char* failed_call() const { return ended() ? failed_call_ : nullptr; }
  CUresult failure() const { return failure_; }

 private:
  PairsAhead(const CudaDriver& driver, CUstream stream, const PairKernels& kernels,
             const kernels::WorkerArguments& arguments)
      : driver_(driver), stream_(stream), kernels_(kernels), arguments_(arguments) {}

  void run();
  void stand_while_paused();
  bool enqueue_batch(CUevent behind);
  bool enqueue_pair();
  bool went_well(const char* call, CUresult result);

  const CudaDriver& driver_;
  const CUstream stream_;
  const PairKernels kernels_;
  kernels::WorkerArguments arguments_;
  std::atomic<std::uint32_t> ctas_{1};
  std::atomic<std::uint32_t> asked_{0};
  std::atomic<bool> ends_{false};
  std::atomic<bool> ended_{false};
  std::atomic<bool> paused_{false};
  std::atomic<bool> stands_{false};
  const char* failed_call_ = nullptr;
  CUresult failure_ = CUDA_SUCCESS;
  CUevent events_[2] = {};  // each after every other batch
  std::thread thread_;
};

}  // namespace epd::device
