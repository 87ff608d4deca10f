// The emulated device: "SMs" are threads, memory is shared memory. The engine's loop is the first
// SM; the others are helper threads that sleep when there is nothing to do.
#pragma once

#include "device/device.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace epd {

class HostDevice;

// Tokens or rows [0, items) cut into chunks that SMs claim one by one.
class HostWork final : public Work {
 public:
  using Body = std::function<void(std::uint32_t begin, std::uint32_t end)>;

  // items: pieces of the work; grain: how many make a chunk.
  HostWork(HostDevice& device, Body body, std::uint32_t items, std::uint32_t grain, const Share& share);
  ~HostWork() override;

  WorkState advance() override;
  bool waiting() const override { return !unclaimed() && !done(); }
  // Claims and runs one chunk; false if none is left.
  bool run_chunk();
  bool done() const { return finished_.load(std::memory_order_acquire) == items_; }
  bool unclaimed() const { return next_.load(std::memory_order_relaxed) < items_; }

 private:
  friend class HostDevice;

  HostDevice& device_;
  Body body_;
  const std::uint32_t items_;
  const std::uint32_t grain_;
  const std::uint32_t max_helpers_;
  const std::int32_t priority_;
  std::uint32_t helpers_ = 0;  // guarded by HostDevice::mutex_
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> finished_{0};
};

class HostDevice final : public Device, public RowMover {
 public:
  HostDevice(std::string name, std::function<void()> notify);
  ~HostDevice() override;

  const std::string& name() const override { return name_; }
  std::uint32_t max_sms() const override { return max_sms_; }
  std::uint32_t num_sms() const override { return num_sms_; }
  void set_num_sms(std::uint32_t sms) override;
  Result<std::unique_ptr<Arena>> map_arena(int fd, std::uint64_t bytes) override;
  Result<std::unique_ptr<Arena>> map_client_memory(int fd, std::uint64_t bytes, bool here) override;
  RowMover* mover() override { return this; }
  std::unique_ptr<Work> dispatch(const kernels::DispatchArgs& args, const Share& share) override;
  std::unique_ptr<Work> fill(const kernels::FillArgs& args, const Share& share) override;
  std::unique_ptr<Work> combine(const kernels::CombineArgs& args, const Share& share) override;

 private:
  friend class HostWork;

  // bytes: moved per item.
  std::unique_ptr<Work> launch(HostWork::Body body, std::uint32_t items, std::uint64_t bytes,
                               const Share& share);
  void withdraw(HostWork* work);  // waits until no helper holds it
  void helper_main(std::uint32_t index);
  HostWork* claimable(std::uint32_t index);  // mutex_ held

  const std::string name_;
  const std::function<void()> notify_;
  const std::uint32_t max_sms_;
  std::uint32_t num_sms_ = 1;  // written by the loop, under mutex_
  std::mutex mutex_;
  std::condition_variable wake_;      // helpers: work or stop
  std::condition_variable released_;  // the loop: a helper let go of a work
  std::deque<HostWork*> works_;       // guarded by mutex_; highest priority first, then oldest
  bool stop_ = false;                 // guarded by mutex_
  std::vector<std::thread> helpers_;  // index i is SM i + 1
};

}  // namespace epd
