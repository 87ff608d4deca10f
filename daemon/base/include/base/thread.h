// A thread that nobody waits for.
#pragma once

#include "base/status.h"

namespace epd {

// RESOURCE_EXHAUSTED if the machine, or a limit, has no room for another. Its stack is small.
Status start_detached_thread(void* (*run)(void*), void* argument);

}  // namespace epd
