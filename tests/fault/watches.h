// Sockets with very many waiters, and who pays for waking them. A thread that receives from a socket, writes
// to it, shuts it down or closes it wakes all that wait at the other end, each by each, in its own time. A
// client may put waiters there without end: an epoll watch is one, and a process may have as many as
// descriptors times epoll instances.
#pragma once

#include "common/fd.h"

#include <sys/types.h>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace epd::test {

// Empty, or what this machine lacks for `watches` of them.
std::string cannot_watch(std::uint64_t watches);

// Throws RankFailure: for processes of their own.
class Watches {
 public:
  // A socket may be watched before it is connected. Raises the limit of this process's descriptors.
  Watches(const std::vector<int>& sockets, std::uint32_t watches_of_each);

 private:
  std::vector<UniqueFd> epolls_;
  std::vector<UniqueFd> copies_;  // of the sockets: an epoll instance watches each descriptor once
};

// Wakes all that wait at a connected socket of our own. Its peer notices nothing.
void wake_own_end(int socket);
// How long that keeps the thread that does it, in ns of its processor time: the least of some tries.
std::uint64_t cost_of_waking_ns(int socket);

// Threads that do nothing but that, so that the queue of those who wait is mostly locked.
class Hammer {
 public:
  Hammer(int socket, std::uint32_t num_threads);

 private:
  std::vector<std::jthread> threads_;
};

// The processor time of each thread of a process, in ns.
using ThreadTimes = std::map<pid_t, std::uint64_t>;
ThreadTimes thread_times(pid_t pid);

}  // namespace epd::test
