#include "waits.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <utility>

namespace epd::client {
namespace {

// If the engine's end of the doorbell is closed, the leader looks this often.
constexpr nanoseconds kBlindSlice = std::chrono::milliseconds(2);

}  // namespace

Status Waits::prepare() {
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return wake_.valid() ? Status() : errno_status("eventfd");
}

void Waits::kick() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof(one));
}

void Waits::notify_locked(const Waiter* except) {
  for (Waiter* waiter : waiters_) {
    if (waiter != except && waiter->ready()) waiter->wake.notify_one();
  }
}

// A waiter in the list. When it leaves, it makes sure that another waiter becomes the leader.
class Waits::Listed {
 public:
  Listed(Waits& waits, Waiter& waiter) : waits_(waits), waiter_(waiter) {
    waits_.waiters_.push_back(&waiter_);
  }
  ~Listed() {
    auto& waiters = waits_.waiters_;
    waiters.erase(std::find(waiters.begin(), waiters.end(), &waiter_));
    if (!waits_.has_leader_ && !waiters.empty()) waiters.front()->wake.notify_one();
  }
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;

 private:
  Waits& waits_;
  Waiter& waiter_;
};

bool Waits::wait(Lock& lock, Waiter& waiter, Deadline deadline) {
  news_.note_end_locked();
  if (waiter.ready()) return true;
  if (deadline.passed()) {
    // A caller that only polls must also see the daemon's death.
    lock.unlock();
    news_.probe();
    lock.lock();
    return waiter.ready();
  }
  const Listed listed(*this, waiter);
  for (;;) {
    news_.note_end_locked();
    if (waiter.ready()) return true;
    const nanoseconds slice = deadline.remaining(waiter.slice);
    if (slice == nanoseconds::zero()) return false;
    if (has_leader_) {
      waiter.wake.wait_until(lock, SteadyClock::now() + slice);
    } else {
      lead(lock, waiter, slice);
    }
  }
}

// The role of leader, taken without the mutex. However the leader ends, it gives the role up, with the mutex.
// Otherwise no thread would look at the descriptors again.
class Waits::Leading {
 public:
  Leading(Waits& waits, Lock& lock) : waits_(waits), lock_(lock) {
    waits_.has_leader_ = true;
    lock_.unlock();
  }
  ~Leading() {
    wake_up();
    if (!lock_.owns_lock()) lock_.lock();
    waits_.has_leader_ = false;
  }
  Leading(const Leading&) = delete;
  Leading& operator=(const Leading&) = delete;
  void fall_asleep() {
    asleep_ = true;
    waits_.a_.client_sleep.sleeping.store(1, std::memory_order_seq_cst);
  }
  void wake_up() {
    if (!std::exchange(asleep_, false)) return;
    waits_.a_.client_sleep.sleeping.store(0, std::memory_order_relaxed);
  }

 private:
  Waits& waits_;
  Lock& lock_;
  bool asleep_ = false;
};

void Waits::lead(Lock& lock, Waiter& waiter, nanoseconds slice) {
  Leading leading(*this, lock);
  if (spin_.spin([&] { return waiter.glance(); })) return;
  // Sets "asleep", then looks once more at everything that waiters wait for. The engine rings for what it
  // publishes after this look.
  leading.fall_asleep();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  lock.lock();
  news_.note_end_locked();
  const bool stay_awake = waiter.ready();
  notify_locked(&waiter);
  lock.unlock();
  if (!stay_awake) sleep(slice);
  leading.wake_up();
  lock.lock();
  // The doorbell may have rung for a follower's counts.
  notify_locked(&waiter);
}

void Waits::sleep(nanoseconds slice) {
  pollfd entries[3] = {{wake_.get(), POLLIN, 0},
                       {doorbell_open_ ? doorbell_.get() : -1, POLLIN, 0},
                       {socket_.get(), POLLIN | POLLRDHUP, 0}};
  const timespec timeout = to_timespec(doorbell_open_ ? slice : std::min(slice, kBlindSlice));
  const SteadyClock::time_point begin = SteadyClock::now();
  const int n = ::ppoll(entries, 3, &timeout, nullptr);
  if (n <= 0) return;
  if (entries[0].revents != 0) {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof(count));
  }
  if (entries[1].revents != 0) {
    drain_doorbell();
    spin_.slept(SteadyClock::now() - begin);
  }
  if (entries[2].revents != 0) news_.look_at_socket();
}

void Waits::drain_doorbell() {
  char bytes[256];
  for (;;) {
    const ssize_t n = ::recv(doorbell_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n > 0 || (n < 0 && errno == EINTR)) continue;
    // Hung up: the engine's end is closed. Only the attach socket says whether the daemon lives.
    if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) doorbell_open_ = false;
    return;
  }
}

}  // namespace epd::client
