// A single-threaded epoll loop. Everything but post() belongs to the thread that runs it. What a handler, a
// task or a turn throws (there is no memory) is logged and ends there: the loop goes on.
#pragma once

#include "base/clock.h"
#include "base/fd.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace epd {

class Loop {
 public:
  using Handler = std::function<void(std::uint32_t epoll_events)>;
  using WatchId = std::uint64_t;  // never 0

  static Result<std::unique_ptr<Loop>> create(const Clock& clock);

  // The descriptor must stay open until remove(). A handler may remove any watch, its own included.
  Result<WatchId> add(int fd, std::uint32_t epoll_events, Handler handler);
  void modify(WatchId id, int fd, std::uint32_t epoll_events);
  void remove(WatchId id, int fd);

  // From any thread: runs `task` on the loop. False once the loop has stopped.
  bool post(std::function<void()> task);

  // Runs until stop(). `turn` is called after each batch of events and returns when it wants to be called
  // again at the latest (CLOCK_MONOTONIC; UINT64_MAX: only after events).
  void run(const std::function<std::uint64_t()>& turn);
  void stop() { stopping_ = true; }

 private:
  explicit Loop(const Clock& clock) : clock_(clock) {}
  void run_posted();
  int timeout_ms(std::uint64_t due_ns) const;

  const Clock& clock_;
  UniqueFd epoll_;
  UniqueFd wake_;
  bool stopping_ = false;
  WatchId next_id_ = 1;
  std::map<WatchId, std::shared_ptr<Handler>> handlers_;
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;  // guarded by mutex_
  bool stopped_ = false;                       // guarded by mutex_
};

}  // namespace epd
