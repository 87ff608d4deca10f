// A thread's own descriptor table, and the system calls of such a thread.
//
// They are plain system calls, because ThreadSanitizer watches those of the C library, and takes a number for
// the same descriptor in all threads.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::own_table {

// Gives the calling thread, and the threads that it starts, their own table with the descriptors of `keep`
// (-1 is ignored) and the standard ones. Descriptors above the highest of them are not copied. False: the
// thread still shares the process's table, and must close nothing.
bool leave(std::span<const int> keep);
inline constexpr std::size_t kMostKept = 32;
// `keep` may have any length. It is ascending, without -1 and standard descriptors.
bool leave_sorted(std::span<const int> keep);

void close(int fd);
int poll(pollfd* entries, std::size_t count, int timeout_ms);
long receive(int socket, msghdr& message, int flags);
long send(int socket, const msghdr& message, int flags);
void shut_down(int socket, int how);
int accept(int listener);    // close-on-exec, non-blocking
bool is_ready(int fd);       // for reading
void ring_socket(int fd);    // as common/fd.h
void ring_eventfd(int fd);   // likewise
void clear_eventfd(int fd);  // non-blocking
// Non-blocking, close-on-exec.
bool make_pair(int socket_type, int (&ends)[2]);

}  // namespace epd::own_table

namespace epd {

// A thread leaves its starter's table and keeps some descriptors. Then the starter closes its own copies,
// which are not the last references, and lets the thread run.
class Departure {
 public:
  // Called by the thread. False: it could not leave, and must end.
  bool leave(std::span<const int> keep) { return wait(own_table::leave(keep)); }
  bool leave_sorted(std::span<const int> keep) { return wait(own_table::leave_sorted(keep)); }
  // Called by the starter.
  bool has_left() {
    state_.wait(kStarting);
    return state_.load() == kLeft;
  }
  void permit() { set(kMayGo); }
  void try_again() { state_.store(kStarting); }

 private:
  bool wait(bool left) {
    set(left ? kLeft : kFailed);
    if (left) state_.wait(kLeft);
    return left;
  }
  enum State : std::uint32_t { kStarting, kLeft, kFailed, kMayGo };
  void set(State state) {
    state_.store(state);
    state_.notify_one();
  }
  std::atomic<std::uint32_t> state_{kStarting};
};

}  // namespace epd
