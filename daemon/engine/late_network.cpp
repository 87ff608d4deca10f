#include "late_network.h"

#include "base/log.h"

#include <system_error>
#include <utility>

namespace epd::engine {

LateNetwork::LateNetwork(std::function<bool()> opens, std::chrono::milliseconds pause,
                         std::function<void()> notify)
    : opens_(std::move(opens)), pause_(pause), notify_(std::move(notify)) {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    log_event(LogLevel::kError, "the network is not tried again", {{"error", error.what()}});
  }
}

LateNetwork::~LateNetwork() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void LateNetwork::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, pause_, [this] { return stop_; })) {
    lock.unlock();
    const bool there = opens_();
    lock.lock();
    if (!there) continue;
    is_there_.store(true, std::memory_order_release);
    notify_();
    return;
  }
}

}  // namespace epd::engine
