// The routings that a rank keeps, as far as the engine reads them: the heads of its routing records. Only the
// device reads the other parts. All lie in the exchange arena and outlive the engine.
#pragma once

#include "device/launcher.h"
#include "proto/exchange.h"

#include <cstdint>
#include <vector>

namespace epd::engine {

struct StandingRouting {
  abi::RoutingRecord head{};  // handle 0: there is none
  std::uint32_t half = 0;
};

// The routing of each record's last dispatch before operation `next`. A record has two halves. The half that
// its last dispatch wrote stays until the next dispatch has ended, because after a break its combine may be
// repeated when this rank has already continued with the next dispatch. Routings of operation `next` or later
// ones are from before a break: they are forgotten, in the arena too.
std::vector<StandingRouting> standing_routings(const abi::GroupShape& shape, device::Launcher& launcher,
                                               std::uint64_t next, std::byte* arena);

}  // namespace epd::engine
