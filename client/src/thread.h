// Threads of the library.
#pragma once

#include "errors.h"

#include <functional>
#include <thread>

namespace epd::client {

// Starts a thread that blocks all signals of the host program.
Status start_thread(const char* name, std::function<void()> body, std::thread& thread);

}  // namespace epd::client
