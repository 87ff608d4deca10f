// A thread that is never joined.
#pragma once

#include "common/status.h"

#include <sys/types.h>

namespace epd {

// RESOURCE_EXHAUSTED if the machine or a limit allows no more threads. Its stack is small.
Status start_detached_thread(void* (*run)(void*), void* argument);

// Whether a thread of this process has not ended. A thread whose function has returned may still be closing
// its descriptors.
bool task_lives(pid_t tid);

}  // namespace epd
