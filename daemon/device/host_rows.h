// How a host moves rows: in chunks, which the engine's loop and helper threads claim one by one. Each of
// these threads counts as an SM. The loop is the first.
#pragma once

#include "kernels/rows.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace epd::device {

class RowWork;

// The helper threads of a device. They sleep when there is nothing to do.
class HostSms {
 public:
  static constexpr std::uint32_t kMost = 256;

  // A helper calls `notify` when work has ended and the loop has not seen that.
  explicit HostSms(std::function<void()> notify);
  ~HostSms();

  std::uint32_t max() const { return max_; }
  std::uint32_t num() const { return num_; }
  // Clamped to 1 .. max(). Takes effect with the next chunk.
  void set_num(std::uint32_t sms);
  void add(RowWork& work);
  void withdraw(RowWork& work);  // waits until no helper holds it

 private:
  void helper_main(std::uint32_t index);
  RowWork* claimable(std::uint32_t index);  // with mutex_ held

  const std::function<void()> notify_;
  const std::uint32_t max_;
  std::uint32_t num_ = 1;  // written by the loop, under mutex_
  std::mutex mutex_;
  std::condition_variable wake_;      // helpers: work or stop
  std::condition_variable released_;  // the loop waits until a helper has released a work
  std::deque<RowWork*> works_;        // guarded by mutex_; highest priority first, then oldest
  bool stop_ = false;                 // guarded by mutex_
  std::vector<std::thread> helpers_;  // index i is SM i + 1
};

// The share of a device's SMs that an operation may use.
struct Share {
  HostSms* of = nullptr;      // null: the calling thread alone
  std::uint32_t sms = 0;      // at most; 0 = all
  std::int32_t priority = 0;  // SMs take the highest first
};

// Tokens or rows [0, items), divided into chunks that SMs claim. The targets of its arguments must live until
// it is done or destroyed. The destructor waits for the chunks that run, which are short.
class RowWork {
 public:
  using Body = std::function<void(std::uint32_t begin, std::uint32_t end)>;

  static std::unique_ptr<RowWork> dispatch(const kernels::DispatchArgs& args, const Share& share);
  static std::unique_ptr<RowWork> fill(const kernels::FillArgs& args, const Share& share);
  static std::unique_ptr<RowWork> combine(const kernels::CombineArgs& args, const Share& share);

  // `bytes` are moved per item.
  RowWork(Body body, std::uint32_t items, std::uint64_t bytes, const Share& share);
  ~RowWork();
  RowWork(const RowWork&) = delete;
  RowWork& operator=(const RowWork&) = delete;

  // Claims and runs one chunk. False if none is left. After done() every row is visible to threads
  // that synchronise with the caller.
  bool run_chunk();
  bool done() const { return finished_.load(std::memory_order_acquire) == items_; }
  // Whether helpers may run the rest.
  bool waiting() const { return !unclaimed() && !done(); }

 private:
  friend class HostSms;

  bool unclaimed() const { return next_.load(std::memory_order_relaxed) < items_; }

  const Body body_;
  const std::uint32_t items_;
  const std::uint32_t grain_;  // items per chunk
  const Share share_;
  const bool shared_;          // with helpers
  std::uint32_t helpers_ = 0;  // guarded by HostSms::mutex_
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> finished_{0};
};

}  // namespace epd::device
