// Session: taking completions, and who sleeps where while there is none.
#include "session.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <utility>

namespace epd::client {
namespace {

// When the doorbell can't ring any more, the leader looks by itself this often.
constexpr nanoseconds kBlindSlice = std::chrono::milliseconds(2);

}  // namespace

bool Session::has_completion() const {
  const std::uint64_t head = completion_head_.load(std::memory_order_relaxed);
  abi::Completion& slot = b().completions.slots[head % abi::kCompletionSlots];
  return std::atomic_ref(slot.sequence).load(std::memory_order_acquire) == head + 1;
}

bool Session::drain_locked() {
  bool any = false;
  abi::Completion completion;
  std::uint64_t head = completion_head_.load(std::memory_order_relaxed);
  // Bounded, so that a ring full of nonsense can't hold the lock for good.
  for (std::size_t i = 0; i < abi::kCompletionSlots && abi::ring_peek(b().completions, head, completion);
       ++i) {
    // Unknown: completed twice because the engine died in between, or its group was left.
    const auto found = operations_.find(completion.ticket);
    if (found != operations_.end() && !found->second.done) finish_locked(found, completion, nullptr);
    completion_head_.store(++head, std::memory_order_relaxed);
    a().completion_head.value.store(head, std::memory_order_release);
    any = true;
  }
  note_ended_locked();
  if (any) {
    ring_engine(abi::kAsleepForRoom);
    notify_ready_locked(nullptr);
  }
  return any;
}

void Session::ring_engine(abi::Sleep at_least) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (b().engine_sleep.sleeping.load(std::memory_order_relaxed) < at_least) return;
  const char byte = 0;
  [[maybe_unused]] const ssize_t n =
      ::send(attachment_.engine_bell.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void Session::finish_locked(Operations::iterator found, const abi::Completion& completion,
                            const char* text) noexcept {
  Operation& op = found->second;
  op.done = true;
  --num_in_flight_;
  op.result.size = sizeof(op.result);
  op.result.status = static_cast<epd_status_t>(checked_code(static_cast<std::uint32_t>(completion.status)));
  op.result.failed_rank = completion.culprit_rank;
  op.result.op_index = completion.op_index;
  op.result.num_recv_rows = completion.num_recv_rows;
  op.result.seen_us = completion.seen_us;
  op.result.launched_us = completion.launched_us;
  op.result.done_us = completion.done_us;
  op.result.num_dropped_selections = completion.num_dropped_selections;
  op.group->end_in_flight(found->first, op.result.status == EPD_OK);
  want_slot_release_locked(*op.group, op.slot);
  if (op.result.status != EPD_OK) {
    try {
      op.text = text != nullptr ? std::string(text) : op.group->board.message_for(op.slot, found->first);
    } catch (...) {
      op.text.clear();  // out of memory: the status alone must do
    }
  }
  if (!op.waiting_hook.empty()) {
    op.waiting_hook.front().result = op.result;
    ready_hooks_.splice(ready_hooks_.end(), op.waiting_hook);
    --hooks_outstanding_;
    operations_.erase(found);
  }
}

// Ends the operations in flight: all, or those of one group.
void Session::abort_locked(StatusCode code, const char* text, const Group* only) noexcept {
  abi::Completion completion{};
  completion.status = code;
  completion.culprit_rank = -1;
  for (auto it = operations_.begin(); it != operations_.end();) {
    const auto current = it++;
    if (current->second.done || (only != nullptr && current->second.group != only)) continue;
    finish_locked(current, completion, text);
  }
}

void Session::notify_ready_locked(const Waiter* except) {
  for (Waiter* waiter : waiters_) {
    if (waiter != except && waiter->ready()) waiter->wake.notify_one();
  }
}

// A waiter's place in the list. Whoever leaves sees to it that somebody keeps watch for the rest.
class Session::Listed {
 public:
  Listed(Session& session, Waiter& waiter) : session_(session), waiter_(waiter) {
    session_.waiters_.push_back(&waiter_);
  }
  ~Listed() {
    auto& waiters = session_.waiters_;
    waiters.erase(std::find(waiters.begin(), waiters.end(), &waiter_));
    if (!session_.has_leader_ && !waiters.empty()) waiters.front()->wake.notify_one();
  }
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;

 private:
  Session& session_;
  Waiter& waiter_;
};

bool Session::wait(Lock& lock, Waiter& waiter, Deadline deadline) {
  drain_locked();
  if (waiter.ready()) return true;
  if (deadline.passed()) {
    // A caller that only polls must hear of the daemon's death too.
    lock.unlock();
    probe();
    lock.lock();
    return waiter.ready();
  }
  const Listed listed(*this, waiter);
  for (;;) {
    drain_locked();
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

// The leader's office, without the mutex to begin with. Given up, with the mutex, however the leader ends:
// nobody else would look at the descriptors again.
class Session::Leading {
 public:
  Leading(Session& session, Lock& lock) : session_(session), lock_(lock) {
    session_.has_leader_ = true;
    lock_.unlock();
  }
  ~Leading() {
    wake_up();
    if (!lock_.owns_lock()) lock_.lock();
    session_.has_leader_ = false;
  }
  Leading(const Leading&) = delete;
  Leading& operator=(const Leading&) = delete;
  void fall_asleep() {
    asleep_ = true;
    session_.a().client_sleep.sleeping.store(1, std::memory_order_seq_cst);
  }
  void wake_up() {
    if (!std::exchange(asleep_, false)) return;
    session_.a().client_sleep.sleeping.store(0, std::memory_order_relaxed);
  }

 private:
  Session& session_;
  Lock& lock_;
  bool asleep_ = false;
};

void Session::lead(Lock& lock, Waiter& waiter, nanoseconds slice) {
  Leading leading(*this, lock);
  if (spin_.spin([&] { return has_completion() || waiter.glance(); })) return;
  // Say "asleep", then look once more at everything that anybody waits for: what the engine publishes
  // after this look, it rings for.
  leading.fall_asleep();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  lock.lock();
  const bool stay_awake = drain_locked() || waiter.ready();
  notify_ready_locked(&waiter);
  lock.unlock();
  if (!stay_awake) sleep(slice);
  leading.wake_up();
  lock.lock();
  // The bell may have rung for a follower's counts.
  notify_ready_locked(&waiter);
}

void Session::sleep(nanoseconds slice) {
  pollfd entries[3] = {{wake_.get(), POLLIN, 0},
                       {doorbell_open_ ? attachment_.client_bell.get() : -1, POLLIN, 0},
                       {attachment_.socket.get(), POLLIN | POLLRDHUP, 0}};
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
  if (entries[2].revents != 0) look_at_socket();
}

void Session::drain_doorbell() {
  char bytes[256];
  for (;;) {
    const ssize_t n = ::recv(attachment_.client_bell.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n > 0 || (n < 0 && errno == EINTR)) continue;
    // Hung up: the engine's end is gone. Only the attach socket says whether the daemon is.
    if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) doorbell_open_ = false;
    return;
  }
}

}  // namespace epd::client
