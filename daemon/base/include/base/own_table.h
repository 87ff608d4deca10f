// A thread's own descriptor table, and the system calls of such a thread.
//
// They are plain system calls, because ThreadSanitizer watches those of the C library, and takes a number for
// the same descriptor in all threads.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <cstddef>
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
