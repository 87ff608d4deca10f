// Maps memory that the daemon passes.
#pragma once

#include "common/memory.h"

namespace epd::client {

// `what` names the segment in errors. Refuses files that may change their size or are shorter than `bytes`.
// So no access to the mapping raises SIGBUS, even if the daemon dies.
Result<Mapping> map_sealed(const UniqueFd& fd, std::uint64_t bytes, Access access, const std::string& what);

}  // namespace epd::client
