// Closes on threads of its own what may take long: the last reference to memory has its pages to free, that
// to a socket wakes all who wait at its other end, and what lies in its queue may linger.
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

}  // namespace epd
