// Mapping what the daemon hands over.
#pragma once

#include "common/memory.h"

namespace epd::client {

// `what` names the segment in errors. Refuses files that could change their size, or are shorter than
// `bytes`: so that no access to the mapping can raise SIGBUS, whatever happens to the daemon.
Result<Mapping> map_sealed(const UniqueFd& fd, std::uint64_t bytes, Access access, const std::string& what);

}  // namespace epd::client
