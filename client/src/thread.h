// Threads of the library's own.
#pragma once

#include "errors.h"

#include <functional>
#include <thread>

namespace epd::client {

// A thread that takes none of the host program's signals.
Status start_thread(const char* name, std::function<void()> body, std::thread& thread);

}  // namespace epd::client
