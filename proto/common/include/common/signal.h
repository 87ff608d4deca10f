// Signals to one process.
#pragma once

#include <sys/types.h>
#include <cerrno>
#include <csignal>

namespace epd {

// kill(2) of the process `pid` alone: 0, or -1 with errno. A `pid` that is not positive names no process
// here (ESRCH). To kill(2) it names many: -1 each process that the caller may signal, 0 its own process
// group.
inline int send_signal(pid_t pid, int number) {
  if (pid > 0) return ::kill(pid, number);
  errno = ESRCH;
  return -1;
}

}  // namespace epd
