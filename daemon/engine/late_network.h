// A network that could not be opened, for example because the node's cable was out: a thread tries again and
// again whether it can be by now.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace epd::engine {

class LateNetwork {
 public:
  // `opens` says whether it can be opened, in the thread. `notify` is called when it can; that is the end of
  // it.
  LateNetwork(std::function<bool()> opens, std::chrono::milliseconds pause, std::function<void()> notify);
  ~LateNetwork();

  bool is_there() const { return is_there_.load(std::memory_order_acquire); }

 private:
  void run();

  const std::function<bool()> opens_;
  const std::chrono::milliseconds pause_;
  const std::function<void()> notify_;
  std::atomic<bool> is_there_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // none if there is no thread to be had
};

}  // namespace epd::engine
