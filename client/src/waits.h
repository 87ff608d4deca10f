// The waiting threads of a session, and how they sleep. See README, "Who sleeps where".
//
// The mutex guards the state of all parts of the session. Their functions with _locked or a Lock need it. It
// is never held while sleeping, or in a call of a device's driver.
#pragma once

#include "common/fd.h"
#include "deadline.h"
#include "proto/session.h"
#include "spin.h"

#include <condition_variable>
#include <mutex>
#include <vector>

namespace epd::client {

using Lock = std::unique_lock<std::mutex>;

// Sleeps until `ready`. std::condition_variable::wait of GCC 12 would need a C++ runtime of its own version:
// that of RHEL 9 is older. wait_for needs nothing newer.
template <typename Ready>
void sleep_until_ready(std::condition_variable& changed, Lock& lock, Ready ready) {
  while (!ready()) changed.wait_for(lock, std::chrono::hours(1));
}

// The wait of one thread. It is in the session's list meanwhile.
class Waiter {
 public:
  Waiter() = default;
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  virtual ~Waiter() = default;
  // Called with the mutex. Must be true once the session has ended.
  virtual bool ready() = 0;
  // Without the mutex, by the leader: a fast look at shared memory; false if there is none.
  virtual bool glance() const { return false; }

  std::condition_variable wake;
  // Looks again at least this often, even if the doorbell never rings because a process died.
  nanoseconds slice = std::chrono::milliseconds(100);
};

// The leader looks at it for all waiters.
class News {
 public:
  virtual ~News() = default;
  virtual void note_end_locked() = 0;  // the end of the session
  // Without the mutex.
  virtual void look_at_socket() noexcept = 0;
  virtual void probe() = 0;  // likewise, seldom
};

// At most one waiting thread is the leader. It alone polls and sleeps on the descriptors. The others sleep on
// their own condition variables.
class Waits {
 public:
  // The engine rings `doorbell` when `a` says that a thread sleeps. `socket` is the daemon's.
  Waits(abi::SegmentA& a, const UniqueFd& doorbell, const UniqueFd& socket, News& news)
      : a_(a), doorbell_(doorbell), socket_(socket), news_(news) {}
  Status prepare();  // once, before anything else: what can fail

  Lock lock() const { return Lock(mutex_); }
  // Returns true when waiter.ready(), false when the deadline passed first. Called and returns with the
  // mutex.
  bool wait(Lock& lock, Waiter& waiter, Deadline deadline);
  // Wakes the threads whose wait is over.
  void notify_locked(const Waiter* except = nullptr);
  void kick() const;  // wakes the leader

 private:
  class Listed;
  class Leading;
  void lead(Lock& lock, Waiter& waiter, nanoseconds slice);
  void sleep(nanoseconds slice);
  void drain_doorbell();

  abi::SegmentA& a_;
  const UniqueFd& doorbell_;
  const UniqueFd& socket_;
  News& news_;
  UniqueFd wake_;  // an eventfd that wakes the leader

  mutable std::mutex mutex_;  // guards the members below, and the state of the session's other parts
  std::vector<Waiter*> waiters_;
  bool has_leader_ = false;

  // Used by the leader alone. The role passes with mutex_.
  SpinBudget spin_;
  bool doorbell_open_ = true;
};

}  // namespace epd::client
