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
#include <utility>

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
  // Frees the pages of a memfd first, so that they go even if a client still maps them. It reads zeros then.
  void empty_and_close(UniqueFd memory) { add({std::move(memory), true}, kDaemon); }
  // The number of a user's descriptors that are not closed yet.
  std::size_t waiting(std::uint32_t uid) const;
  // Whether no descriptor waits or is being closed.
  bool idle() const;

 private:
  struct Closing {
    UniqueFd fd;
    bool empty = false;
  };
  struct Queue {
    std::deque<Closing> waiting;
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
  void add(Closing closing, std::uint32_t uid);
  bool start_thread(std::uint32_t uid);

  std::shared_ptr<Shared> shared_;  // shared with the threads, which are not joined
};

}  // namespace epd
