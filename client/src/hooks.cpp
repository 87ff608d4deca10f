// Session: completion hooks, on one thread of the library that lives from the first hook to detach.
#include "session.h"

#include <pthread.h>
#include <algorithm>
#include <csignal>
#include <system_error>

namespace epd::client {

Status start_thread(const char* name, std::function<void()> body, std::thread& thread) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::error_code error;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& failed) {
    error = failed.code();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error) return errno_status(std::string("starting the thread ") + name, error.value());
  ::pthread_setname_np(thread.native_handle(), name);
  return {};
}

class HookWaiter final : public Waiter {
 public:
  explicit HookWaiter(Session& session) : session_(session) {}
  bool ready() override {
    session_.take_hooked_calls_locked();
    slice = session_.hooked_calls_.empty() ? kSlice : kCallSlice;
    if (!session_.hooked_calls_.empty() && session_.device_look_due_locked()) return true;
    return !session_.ready_hooks_.empty() || session_.stopping_ || !session_.hooks_have_news_to_await();
  }

 private:
  static constexpr nanoseconds kSlice = std::chrono::milliseconds(100);
  static constexpr nanoseconds kCallSlice = std::chrono::microseconds(100);  // nobody rings for these

  Session& session_;
};

bool Session::in_hook_thread() const {
  const Lock lock(mutex_);
  return hook_thread_.get_id() == std::this_thread::get_id();
}

Status Session::start_hooks_locked() {
  if (hook_thread_.joinable()) return {};
  return start_thread(
      "epd-hooks", [this] { run_hooks(); }, hook_thread_);
}

// Of operations that have hooks; and of joins that were given up, for which nobody else may ever look.
bool Session::hooks_have_news_to_await() const {
  return hooks_outstanding_ != 0 || awaits_late_join_locked();
}

Status Session::on_complete(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user) {
  if (CallTicket::is(ticket)) return hook_call(group, ticket, hook, user);
  const Lock lock(mutex_);
  const auto found = operations_.find(ticket);
  if (found == operations_.end() || found->second.group != &group || !found->second.waiting_hook.empty()) {
    return not_found("ticket " + std::to_string(ticket) +
                     " is not in flight in this group: never issued, retired already, or it has a hook");
  }
  Status started = start_hooks_locked();
  if (!started.ok()) return started;
  Operation& op = found->second;
  std::list<HookCall> call(1);
  call.front() = {&group, hook, user, op.result};
  if (op.done) {
    ready_hooks_.splice(ready_hooks_.end(), call);
    operations_.erase(found);
  } else {
    op.waiting_hook.splice(op.waiting_hook.end(), call);
    ++hooks_outstanding_;
  }
  hook_wake_.notify_one();
  notify_ready_locked(nullptr);
  kick();  // the thread may be the leader, asleep for another ticket
  return {};
}

Status Session::drop(Group& group, epd_ticket_t ticket) {
  if (!CallTicket::is(ticket))
    return on_complete(
        group, ticket, [](const epd_result_t*, void*) {}, nullptr);
  const Lock lock(mutex_);
  if (find_call_locked(group, ticket) == nullptr) return unknown_call(ticket);
  group.calls.forget(ticket);
  return {};
}

void Session::run_hooks() {
  Lock lock(mutex_);
  for (;;) {
    if (!ready_hooks_.empty()) {
      std::list<HookCall> call;
      call.splice(call.end(), ready_hooks_, ready_hooks_.begin());
      hook_running_ = call.front().group;
      lock.unlock();
      call.front().hook(&call.front().result, call.front().user);
      lock.lock();
      hook_running_ = nullptr;
      hook_done_.notify_all();
    } else if (stopping_) {
      return;
    } else if (!hooks_have_news_to_await()) {
      hook_wake_.wait(lock);
    } else {
      HookWaiter waiter(*this);
      wait(lock, waiter, Deadline::in_ms(EPD_FOREVER));
      if (hooked_calls_.empty()) continue;
      lock.unlock();
      look_at_device();
      lock.lock();
    }
  }
}

// A hook may use its group until it returns.
void Session::await_hooks_locked(Lock& lock, const Group& group) {
  take_hooked_calls_locked();
  hook_wake_.notify_one();
  notify_ready_locked(nullptr);
  kick();
  hook_done_.wait(lock, [&] {
    return hook_running_ != &group &&
           std::none_of(ready_hooks_.begin(), ready_hooks_.end(),
                        [&](const HookCall& call) { return call.group == &group; });
  });
}

// After the session has ended: nothing is outstanding, only calls that are ready.
void Session::stop_hooks() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    take_hooked_calls_locked();
    hook_wake_.notify_one();
    notify_ready_locked(nullptr);
  }
  kick();
  if (hook_thread_.joinable()) hook_thread_.join();
}

}  // namespace epd::client
