// A descriptor table of a thread's own, and the calls of a thread that has one.
//
// The calls are the plain system calls: ThreadSanitizer, which sees those of the C library, takes a number
// for the same descriptor in all threads.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <cstddef>
#include <span>

namespace epd::own_table {

// Gives the calling thread, and the threads that it starts, a table of its own: the descriptors of `keep`, -1
// ignored, and the standard ones. Those above the highest of them are not even copied. False: it still shares
// the process's, and must close nothing.
bool leave(std::span<const int> keep);
inline constexpr std::size_t kMostKept = 32;
// Any number of them, ascending, none of them -1 or a standard one.
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
