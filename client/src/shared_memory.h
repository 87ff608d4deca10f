// Maps memory that the daemon passes.
#pragma once

#include "common/memory.h"

namespace epd::client {

// `what` names the segment in errors. Refuses files that may change their size or are shorter than `bytes`.
// So no access to the mapping raises SIGBUS, even if the daemon dies.
Result<Mapping> map_sealed(const UniqueFd& fd, std::uint64_t bytes, Access access, const std::string& what);
// The same in place of a mapping of as many bytes, at its address.
Status map_sealed_over(Mapping& former, const UniqueFd& fd, Access access, const std::string& what);

}  // namespace epd::client
