// A thread that nobody waits for.
#pragma once

#include "common/status.h"

#include <sys/types.h>

namespace epd {

// RESOURCE_EXHAUSTED if the machine, or a limit, has no room for another. Its stack is small.
Status start_detached_thread(void* (*run)(void*), void* argument);

// Whether a thread of this process has not ended yet. One whose function has returned may still be closing
// what it had.
bool task_lives(pid_t tid);

}  // namespace epd
