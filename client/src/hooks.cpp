#include "hooks.h"

#include "thread.h"

#include <algorithm>
#include <utility>

namespace epd::client {

class Hooks::News final : public Waiter {
 public:
  explicit News(Hooks& hooks) : hooks_(hooks) {}
  bool ready() override {
    slice = hooks_.source_.take_hooked_locked() ? kLookAgain : kSlice;
    return !hooks_.ready_.empty() || hooks_.stopping_ || !hooks_.has_news_to_await();
  }

 private:
  static constexpr nanoseconds kSlice = std::chrono::milliseconds(100);
  static constexpr nanoseconds kLookAgain = std::chrono::microseconds(100);  // no doorbell rings for these

  Hooks& hooks_;
};

bool Hooks::in_thread() const {
  const Lock lock = waits_.lock();
  return thread_.get_id() == std::this_thread::get_id();
}

Status Hooks::start_locked() {
  if (thread_.joinable()) return {};
  return start_thread(
      "epd-hooks", [this] { run(); }, thread_);
}

// The wait of the hook thread: for operations with hooks, and for joins that were given up, whose replies no
// other thread may read.
bool Hooks::has_news_to_await() const {
  return outstanding_ != 0 || source_.awaits_packets_locked();
}

void Hooks::look_up_locked() {
  wake_.notify_one();
  waits_.notify_locked();
  waits_.kick();  // the thread may be the leader, and asleep for something else
}

void Hooks::expect_locked() {
  ++outstanding_;
  look_up_locked();
}

void Hooks::ready_locked(std::list<HookCall>& call) noexcept {
  ready_.splice(ready_.end(), call);
  --outstanding_;
}

void Hooks::call_locked(std::list<HookCall>& call) {
  ready_.splice(ready_.end(), call);
  look_up_locked();
}

void Hooks::run() {
  static constexpr std::int64_t kLookAtDevice_ms = 100;
  Lock lock = waits_.lock();
  for (;;) {
    if (!ready_.empty()) {
      std::list<HookCall> call;
      call.splice(call.end(), ready_, ready_.begin());
      running_ = call.front().group;
      lock.unlock();
      if (call.front().outputs_of != 0) source_.finish_outputs(call.front());
      call.front().hook(&call.front().result, call.front().user);
      lock.lock();
      running_ = nullptr;
      done_.notify_all();
    } else if (stopping_) {
      return;
    } else if (!has_news_to_await()) {
      sleep_until_ready(wake_, lock, [&] { return stopping_ || !ready_.empty() || has_news_to_await(); });
    } else {
      News news(*this);
      if (waits_.wait(lock, news, Deadline::in_ms(kLookAtDevice_ms))) continue;
      lock.unlock();
      source_.look_at_device();
      lock.lock();
    }
  }
}

void Hooks::await_locked(Lock& lock, const Group& group) {
  source_.take_hooked_locked();
  look_up_locked();
  sleep_until_ready(done_, lock, [&] {
    return running_ != &group && std::none_of(ready_.begin(), ready_.end(),
                                              [&](const HookCall& call) { return call.group == &group; });
  });
}

void Hooks::stop() {
  {
    const Lock lock = waits_.lock();
    stopping_ = true;
    source_.take_hooked_locked();
    look_up_locked();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace epd::client
