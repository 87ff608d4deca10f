// Whether this process may open network sockets at all.
#pragma once

#include "common/status.h"

namespace epd {

// PERMISSION_DENIED, with what to do, where the kernel or a service's sandbox allows no socket of this family
// (AF_INET, AF_INET6).
Status may_use_network(int family);

}  // namespace epd
