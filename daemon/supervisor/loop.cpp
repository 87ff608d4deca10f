#include "loop.h"

#include "base/log.h"

#include <poll.h>
#include <unistd.h>
#include <algorithm>
#include <exception>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;
constexpr std::uint64_t kLongestWaitMs = 60'000;
constexpr std::uint64_t kAfterFailureNs = 100'000'000;

void log_thrown(const char* where, const char* what) noexcept {
  try {
    static LogLimiter limiter;
    limiter.log(LogLevel::kError, "exception in the loop", {{"where", where}, {"what", what}});
  } catch (...) {  // there is no memory even for a line of the log
  }
}

// False if it threw.
template <typename Call>
bool guarded(const char* where, const Call& call) noexcept {
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    log_thrown(where, error.what());
  } catch (...) {
    log_thrown(where, "unknown");
  }
  return false;
}

}  // namespace

Result<std::unique_ptr<Loop>> Loop::create(LoopClock& clock) {
  std::unique_ptr<Loop> loop(new Loop(clock));
  loop->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!loop->epoll_.valid()) return errno_status("epoll_create1");
  Result<UniqueFd> wake = make_eventfd();
  if (!wake.ok()) return wake.status();
  loop->wake_ = std::move(*wake);
  Loop* self = loop.get();
  Result<WatchId> id = loop->add(loop->wake_.get(), EPOLLIN, [self](std::uint32_t) { self->run_posted(); });
  if (!id.ok()) return id.status();
  return loop;
}

Result<Loop::WatchId> Loop::add(int fd, std::uint32_t epoll_events, Handler handler) {
  const WatchId id = next_id_++;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return errno_status("epoll_ctl");
  handlers_.emplace(id, std::make_shared<Handler>(std::move(handler)));
  return id;
}

void Loop::modify(WatchId id, int fd, std::uint32_t epoll_events) {
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = id;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::remove(WatchId id, int fd) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  handlers_.erase(id);
}

bool Loop::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    posted_.push_back(std::move(task));
  }
  ring_eventfd(wake_.get());
  return true;
}

void Loop::run_posted() {
  std::uint64_t count;
  [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &count, sizeof(count));
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(posted_);
  }
  for (const auto& task : tasks) guarded("a posted task", task);
}

// Reads the clock before and after the sleep. handle_events() finds everything that came before the second
// reading.
void Loop::sleep_until(std::uint64_t due_ns) {
  clock_.look(0);
  const std::uint64_t now = clock_.now_ns();
  const std::uint64_t wait_ms = due_ns <= now ? 0 : std::min((due_ns - now) / kMsNs + 1, kLongestWaitMs);
  pollfd entry{epoll_.get(), POLLIN, 0};
  ::poll(&entry, 1, static_cast<int>(wait_ms));
  clock_.look(wait_ms * kMsNs);
}

// One call returns every watch that is ready.
void Loop::handle_events() {
  events_.resize(handlers_.size());
  const int n = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), 0);
  for (int i = 0; i < n; ++i) {
    const epoll_event event = events_[static_cast<std::size_t>(i)];
    const auto found = handlers_.find(event.data.u64);
    if (found == handlers_.end()) continue;  // an earlier handler of this turn has removed it
    const std::shared_ptr<Handler> handler = found->second;
    guarded("a handler", [&] { (*handler)(event.events); });
  }
}

void Loop::run(const std::function<std::uint64_t()>& turn) {
  while (!stopping_) {
    std::uint64_t due_ns = 0;
    if (!guarded("a turn", [&] { due_ns = turn(); })) due_ns = clock_.now_ns() + kAfterFailureNs;
    if (stopping_) break;
    sleep_until(due_ns);
    handle_events();
  }
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  posted_.clear();
}

}  // namespace epd::supervisor
