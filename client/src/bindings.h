// Regions that a rank keeps in memory of its own.
#pragma once

#include "epd/epd.h"
#include "errors.h"
#include "proto/arena.h"

#include <array>
#include <cstdint>
#include <vector>

namespace epd::client {

struct OwnMemory {
  abi::Bindings bindings{};                           // as they go to the daemon
  std::array<std::uintptr_t, abi::kNumRegions> at{};  // of slot 0's, in this process or on its device
  std::vector<int> fds;  // the caller's, each once; what bindings' `memory` counts
};

// INVALID_ARGUMENT if it is no region's number.
Status read_region(const epd_region_t& given, const char* name, std::uint32_t& region);
// The regions that a configuration with a checked shape binds, as bits; nothing else of its bindings is
// looked at.
Status read_bound_regions(const epd_group_config_t& config, const abi::GroupShape& shape,
                          std::uint32_t& bound);
// The checked bindings of a configuration whose shape has been checked. What the memory is, the daemon finds
// out.
Status read_bindings(const epd_group_config_t& config, const abi::GroupShape& shape, OwnMemory& own);

}  // namespace epd::client
