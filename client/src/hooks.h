// Completion hooks. They run on one thread of the library, from the first hook to detach. See README,
// "Hooks".
#pragma once

#include "epd/epd.h"
#include "waits.h"

#include <condition_variable>
#include <list>
#include <thread>

namespace epd::client {

struct Group;

struct HookCall {
  Group* group = nullptr;
  epd_hook_t hook = nullptr;
  void* user = nullptr;
  epd_result_t result{};
  epd_ticket_t outputs_of = 0;  // not 0: this operation has outputs in the caller's memory
  std::uint32_t slot = 0;       // then
};

// Which operations with hooks have ended.
class HookSource {
 public:
  virtual ~HookSource() = default;
  // Called with the mutex. Gives hooks of operations that have ended to Hooks::ready_locked(). True: some
  // have not ended, and no doorbell will ring for them.
  virtual bool take_hooked_locked() = 0;
  // Called with the mutex. True: there is something to wait for, though no operation has a hook.
  virtual bool awaits_packets_locked() const = 0;
  // Without the mutex, before the hook is called.
  virtual void finish_outputs(const HookCall& call) = 0;
  // Without the mutex, from time to time.
  virtual void look_at_device() = 0;
};

class Hooks {
 public:
  Hooks(Waits& waits, HookSource& source) : waits_(waits), source_(source) {}

  bool in_thread() const;
  Status start_locked();
  // For an operation in flight. Its hook is called after ready_locked() gets it. After start_locked().
  void expect_locked();
  // A hook that was expected. An empty list: there is nothing to call after all.
  void ready_locked(std::list<HookCall>& call) noexcept;
  // For an operation that has ended.
  void call_locked(std::list<HookCall>& call);
  void look_up_locked();  // the thread checks again what it waits for
  // Returns when no hook of the group runs or is ready. A hook may use its group until it returns.
  void await_locked(Lock& lock, const Group& group);
  // After the session has ended: only ready hooks are left, and they run.
  void stop();

 private:
  class News;
  bool has_news_to_await() const;
  void run();

  Waits& waits_;
  HookSource& source_;

  // Guarded by the mutex.
  std::thread thread_;
  std::condition_variable wake_;  // there are hooks to wait for, or stopping
  std::condition_variable done_;  // a hook has returned
  std::list<HookCall> ready_;
  const Group* running_ = nullptr;
  std::size_t outstanding_ = 0;  // hooks of operations that have not ended
  bool stopping_ = false;
};

}  // namespace epd::client
