#pragma once

#include "common/status.h"

#include <sys/types.h>

namespace epd {

// A thread that is never joined, and whether threads can be started.

// Starts a thread with a small stack that is never joined. RESOURCE_EXHAUSTED if the machine or a limit
// allows no more threads.
Status start_detached_thread(void* (*run)(void*), void* argument);

// RESOURCE_EXHAUSTED if `count` threads can't run now at the same time. Another program may take the room
// afterwards.
Status try_threads(unsigned count);
// Called before each start of a gRPC server, which aborts the process if it can't start its threads.
Status room_for_grpc_server();

// Whether a thread of this process has not ended. A thread whose function has returned may still be closing
// its descriptors.
bool task_lives(pid_t tid);

// The end of the process.

// Ends the process with `code` after that time, if it has not ended by itself. Starts no thread, since none
// may be available. Log lines are written by then. Called at most once.
void end_within(unsigned seconds, int code);

}  // namespace epd
