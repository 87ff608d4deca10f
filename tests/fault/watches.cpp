#include "watches.h"

#include "support/ranks.h"

#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kEpolls = 100;
constexpr std::size_t kOtherDescriptors = 500;
constexpr int kTries = 3;

std::uint64_t number_in(const fs::path& file) {
  std::ifstream in(file);
  std::uint64_t number = 0;
  in >> number;
  return number;
}

std::uint64_t thread_time_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

void raise_descriptor_limit() {
  rlimit limit{};
  RANK_CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit");
  limit.rlim_cur = limit.rlim_max;
  RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
}

void watch(int epoll, int socket) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT;
  RANK_CHECK(::epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event) == 0, std::strerror(errno));
}

}  // namespace

std::string cannot_watch(std::uint64_t watches) {
  const std::uint64_t allowed = number_in("/proc/sys/fs/epoll/max_user_watches");
  if (allowed < watches) {
    return "fs.epoll.max_user_watches is " + std::to_string(allowed) + "; needed: " + std::to_string(watches);
  }
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::uint64_t needed = watches / kEpolls + kEpolls + kOtherDescriptors;
  if (limit.rlim_max < needed) {
    return "RLIMIT_NOFILE is " + std::to_string(limit.rlim_max) + "; needed: " + std::to_string(needed);
  }
  ::usleep(1000);  // what a process has had is written down when it pauses
  return number_in("/proc/self/schedstat") != 0 ? "" : "/proc/PID/schedstat tells no times";
}

Watches::Watches(const std::vector<int>& sockets, std::uint32_t watches_of_each) {
  raise_descriptor_limit();
  for (std::size_t i = 0; i < kEpolls; ++i) {
    epolls_.emplace_back(::epoll_create1(EPOLL_CLOEXEC));
    RANK_CHECK(epolls_.back().valid(), std::strerror(errno));
  }
  for (const int socket : sockets) {
    for (std::size_t i = 0; i < watches_of_each / kEpolls; ++i) {
      Result<UniqueFd> copy = duplicate(socket);
      RANK_CHECK(copy.ok(), copy.status().to_string());
      for (const UniqueFd& epoll : epolls_) watch(epoll.get(), copy->get());
      copies_.push_back(std::move(*copy));
    }
  }
}

// The kernel makes space for a packet before it looks at its bytes, and gives it back when they can't be
// read: "there is space again" is news for all that wait.
void wake_own_end(int socket) {
  void* nowhere = reinterpret_cast<void*>(1);
  const ssize_t sent = ::send(socket, nowhere, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  RANK_CHECK(sent < 0 && errno == EFAULT, "a packet of unreadable memory was sent");
}

std::uint64_t cost_of_waking_ns(int socket) {
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t begin = thread_time_ns();
    wake_own_end(socket);
    least = std::min(least, thread_time_ns() - begin);
  }
  return least;
}

Hammer::Hammer(int socket, std::uint32_t num_threads) {
  for (std::uint32_t i = 0; i < num_threads; ++i) {
    threads_.emplace_back([socket](const std::stop_token& token) {
      while (!token.stop_requested())
        ::send(socket, reinterpret_cast<void*>(1), 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    });
  }
}

ThreadTimes thread_times(pid_t pid) {
  ThreadTimes times;
  std::error_code error;
  const fs::path tasks = fs::path("/proc") / std::to_string(pid) / "task";
  for (fs::directory_iterator it(tasks, error), end; !error && it != end; it.increment(error))
    times[static_cast<pid_t>(std::stol(it->path().filename()))] = number_in(it->path() / "schedstat");
  return times;
}

}  // namespace epd::test
