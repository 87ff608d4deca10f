// Closes descriptors whose close may be slow, on its own threads. The last reference to memory frees its
// pages, and closing something that a client has made may wait for the client. Each user has a thread, so no
// user waits for another.
#pragma once

#include "common/fd.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

namespace epd {

class Closer {
 public:
  static constexpr std::uint32_t kDaemon = ~std::uint32_t{0};  // in place of a user: made by no client
  static constexpr std::size_t kMaxThreads = 64;

  Closer() : shared_(std::make_shared<Shared>()) {}
  // Descriptors that are not closed yet stay open until the process ends.
  ~Closer();
  Closer(const Closer&) = delete;
  Closer& operator=(const Closer&) = delete;

  void close(UniqueFd descriptor, std::uint32_t uid = kDaemon);
  // How many descriptors of a user are not closed yet.
  std::size_t waiting(std::uint32_t uid) const;
  // True if none waits and none is being closed.
  bool idle() const;

 private:
  struct Queue {
    std::deque<UniqueFd> waiting;
    bool has_thread = false;
    bool closing = false;  // one that is no longer in the queue
  };
  struct Shared {
    std::mutex mutex;
    std::map<std::uint32_t, Queue> queues;  // guarded by mutex; by user, without empty ones
    std::size_t threads = 0;                // likewise
  };
  struct Thread;
  static void* run(void* thread);
  static void serve(Shared& shared, std::uint32_t uid, std::unique_lock<std::mutex>& lock);
  bool start_thread(std::uint32_t uid);

  std::shared_ptr<Shared> shared_;  // shared with the threads, which are not joined
};

}  // namespace epd
