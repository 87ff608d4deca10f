// A thread that is never joined, and whether threads can be started.
#pragma once

#include "common/status.h"

#include <sys/types.h>

namespace epd {

// RESOURCE_EXHAUSTED if the machine or a limit allows no more threads. Its stack is small.
Status start_detached_thread(void* (*run)(void*), void* argument);

// RESOURCE_EXHAUSTED if so many threads can't be started now, at the same time. Somebody else may take the
// room meanwhile.
Status try_threads(unsigned count);
// Before each server of gRPC: it aborts the process where it can't start its threads.
Status room_for_grpc_server();

// Whether a thread of this process has not ended. A thread whose function has returned may still be closing
// its descriptors.
bool task_lives(pid_t tid);

}  // namespace epd
