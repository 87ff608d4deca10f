// Closes on threads of its own what may take long: the last reference to memory has its pages to free, that
// to a doorbell all the epoll watches that a client has put there.
#pragma once

#include "base/fd.h"

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

namespace epd {

class Closer {
 public:
  static constexpr std::size_t kMaxThreads = 8;

  Closer() : shared_(std::make_shared<Shared>()) {}
  // What has not been closed yet stays open until the process ends.
  ~Closer();
  Closer(const Closer&) = delete;
  Closer& operator=(const Closer&) = delete;

  void close(UniqueFd descriptor);
  // Nothing waits, and nothing is being closed.
  bool idle() const;

 private:
  struct Shared {
    std::mutex mutex;
    std::deque<UniqueFd> waiting;  // guarded by mutex
    std::size_t threads = 0;       // guarded by mutex
  };
  static void* run(void* shared);
  void start_thread();

  std::shared_ptr<Shared> shared_;  // with the threads, which nobody waits for
};

// A descriptor whose end is the closer's, which outlives it.
class SlowFd {
 public:
  SlowFd() = default;
  SlowFd(UniqueFd fd, Closer& closer) : fd_(std::move(fd)), closer_(&closer) {}
  SlowFd(SlowFd&&) noexcept = default;
  SlowFd& operator=(SlowFd&& other) noexcept {
    if (this == &other) return *this;
    hand_over();
    fd_ = std::move(other.fd_);
    closer_ = other.closer_;
    return *this;
  }
  ~SlowFd() { hand_over(); }

  int get() const { return fd_.get(); }
  bool valid() const { return fd_.valid(); }

 private:
  void hand_over() {
    if (fd_.valid()) closer_->close(std::move(fd_));
  }

  UniqueFd fd_;
  Closer* closer_ = nullptr;
};

}  // namespace epd
