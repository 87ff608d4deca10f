// Regions that a rank keeps in memory of its own.
#pragma once

#include "device.h"
#include "epd/epd.h"
#include "errors.h"
#include "proto/arena.h"

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

namespace epd::client {

struct OwnMemory {
  abi::Bindings bindings{};  // as they go to the daemon
  std::array<std::uintptr_t, abi::kNumRegions>
      at{};              // addresses of slot 0's regions, in this process or on its device
  std::vector<int> fds;  // each once; a binding's `memory` is an index + 1. The caller's, or Allocations'
};

// The allocations in which memory lies that bindings name by its address. They are needed until the join.
class Allocations {
 public:
  // `device`: null on host devices.
  explicit Allocations(Device* device) : device_(device) {}
  // The same one for all addresses in it.
  Status find(std::uintptr_t address, const ExportedAllocation*& out);

 private:
  Device* const device_;
  std::deque<ExportedAllocation> found_;  // where they lie is kept
};

// INVALID_ARGUMENT: not a region's number.
Status read_region(const epd_region_t& given, const char* name, std::uint32_t& region);
// The regions that a configuration binds, as bits. The shape has been checked. Other fields of the bindings
// are ignored.
Status read_bound_regions(const epd_group_config_t& config, const abi::GroupShape& shape,
                          std::uint32_t& bound);
// Checks the bindings of a configuration whose shape has been checked. The daemon checks the memory itself.
Status read_bindings(const epd_group_config_t& config, const abi::GroupShape& shape, Allocations& allocations,
                     OwnMemory& own);

}  // namespace epd::client
