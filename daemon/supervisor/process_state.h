// State of processes from /proc. Each function returns false for a process that does not exist, and where
// /proc hides the processes of other users. From any thread.
#pragma once

#include <sys/types.h>

namespace epd::supervisor {

// Whether a signal or a tracer has stopped it.
bool is_stopped(pid_t pid);
// Whether it is about to end, even if the driver still has work for that. The number may be a later
// process's: a caller that must be sure checks the pidfd afterwards.
bool is_ending(pid_t pid);

}  // namespace epd::supervisor
