// System calls without which the daemon can't serve, and which an old kernel or a sandbox's filter refuses.
#pragma once

#include "common/status.h"

namespace epd::supervisor {

// UNSUPPORTED names the system call that is refused. Tries each one without an effect.
Status check_system_calls();

}  // namespace epd::supervisor
