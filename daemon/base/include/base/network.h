// Where the daemon listens for anybody: metrics.listen.
#pragma once

#include "common/fd.h"
#include "common/status.h"

#include <string>

namespace epd {

// A socket that listens at `listen`, an address and a port that the configuration has checked: "127.0.0.1:0",
// "[::1]:9455". It does not block. `key` is the option, for refusals. PERMISSION_DENIED, with what to do,
// where the kernel or a service's sandbox allows no network socket; RESOURCE_EXHAUSTED with the system's
// reason.
Result<UniqueFd> open_listener(const std::string& key, const std::string& listen, int backlog);

}  // namespace epd
