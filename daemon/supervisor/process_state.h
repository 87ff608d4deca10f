// What /proc says of a process. Each is false of one that is not there, and where /proc hides other users'
// processes. From any thread.
#pragma once

#include <sys/types.h>

namespace epd::supervisor {

// By a signal or a tracer.
bool is_stopped(pid_t pid);
// It is on its way out, whatever the driver still has to do for that. The number may be a later process's:
// whoever must know asks the pidfd behind this.
bool is_ending(pid_t pid);

}  // namespace epd::supervisor
