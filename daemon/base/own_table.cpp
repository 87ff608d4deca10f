#include "base/own_table.h"

#include "common/status.h"

#include <linux/close_range.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cstdint>

namespace epd::own_table {

// Allocates nothing: there may be no memory, and an exception in a thread ends the process.
bool leave(std::span<const int> keep) {
  EPD_CHECK(keep.size() <= kMostKept);
  std::array<int, kMostKept> kept{};
  const auto end =
      std::copy_if(keep.begin(), keep.end(), kept.begin(), [](int fd) { return fd > STDERR_FILENO; });
  std::sort(kept.begin(), end);
  return leave_sorted(std::span<const int>(kept.begin(), end));
}

bool leave_sorted(std::span<const int> keep) {
  int next = STDERR_FILENO + 1;
  const int top = keep.empty() ? STDERR_FILENO : keep.back();
  if (::syscall(SYS_close_range, top + 1, ~0u, CLOSE_RANGE_UNSHARE) != 0) return false;
  for (const int fd : keep) {
    if (fd > next) ::syscall(SYS_close_range, next, fd - 1, 0);
    next = fd + 1;
  }
  return true;
}

void close(int fd) {
  if (fd >= 0) ::syscall(SYS_close, fd);
}

int poll(pollfd* entries, std::size_t count, int timeout_ms) {
  const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  return static_cast<int>(
      ::syscall(SYS_ppoll, entries, count, timeout_ms < 0 ? nullptr : &timeout, nullptr, 0));
}

long receive(int socket, msghdr& message, int flags) {
  return ::syscall(SYS_recvmsg, socket, &message, flags);
}

long send(int socket, const msghdr& message, int flags) {
  return ::syscall(SYS_sendmsg, socket, &message, flags | MSG_NOSIGNAL);
}

void shut_down(int socket, int how) {
  ::syscall(SYS_shutdown, socket, how);
}

int accept(int listener) {
  return static_cast<int>(::syscall(SYS_accept4, listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

bool is_ready(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return own_table::poll(&entry, 1, 0) > 0;
}

void ring_socket(int fd) {
  char byte = 0;
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  send(fd, message, MSG_DONTWAIT);
}

void ring_eventfd(int fd) {
  const std::uint64_t one = 1;
  ::syscall(SYS_write, fd, &one, sizeof(one));
}

void clear_eventfd(int fd) {
  std::uint64_t count;
  ::syscall(SYS_read, fd, &count, sizeof(count));
}

bool make_pair(int socket_type, int (&ends)[2]) {
  return ::syscall(SYS_socketpair, AF_UNIX, socket_type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0;
}

}  // namespace epd::own_table
