// A single-threaded epoll loop. Everything but post() belongs to the thread that runs it. What a handler, a
// task or a turn throws (there is no memory) is logged and ends there: the loop goes on.
#pragma once

#include "common/fd.h"
#include "loop_clock.h"

#include <sys/epoll.h>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace epd::supervisor {

class Loop {
 public:
  using Handler = std::function<void(std::uint32_t epoll_events)>;
  using WatchId = std::uint64_t;  // never 0

  // The clock is this loop's: it looks at it, nobody else does.
  static Result<std::unique_ptr<Loop>> create(LoopClock& clock);

  // The descriptor must stay open until remove(). A handler may remove any watch, its own included.
  Result<WatchId> add(int fd, std::uint32_t epoll_events, Handler handler);
  void modify(WatchId id, int fd, std::uint32_t epoll_events);
  void remove(WatchId id, int fd);

  // From any thread: runs `task` on the loop. False once the loop has stopped.
  bool post(std::function<void()> task);

  // Runs until stop(). `turn` is called when everything that was readable has been handled, and returns when
  // it wants to be called again at the latest (by the loop's clock; UINT64_MAX: only after events).
  void run(const std::function<std::uint64_t()>& turn);
  void stop() { stopping_ = true; }
  // For deadlines.
  std::uint64_t now_ns() const { return clock_.now_ns(); }

 private:
  explicit Loop(LoopClock& clock) : clock_(clock) {}
  void run_posted();
  void sleep_until(std::uint64_t due_ns);
  void handle_events();

  LoopClock& clock_;
  UniqueFd epoll_;
  UniqueFd wake_;
  bool stopping_ = false;
  WatchId next_id_ = 1;
  std::map<WatchId, std::shared_ptr<Handler>> handlers_;
  std::vector<epoll_event> events_;  // room for one of each
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;  // guarded by mutex_
  bool stopped_ = false;                       // guarded by mutex_
};

}  // namespace epd::supervisor
