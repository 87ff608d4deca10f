// The routings that one rank keeps, as far as the engine reads them. Only the device reads their other parts.
// All lie in the exchange arena and outlive the engine.
#pragma once

#include "device/launcher.h"
#include "proto/exchange.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace epd::engine {

// The heads of a rank's routing records. A record has two halves. What its last dispatch wrote stays until
// the next dispatch has ended, because after a break its combine may be repeated when this rank has already
// gone on to the next dispatch.
class RouteHeads {
 public:
  using Head = abi::RoutingRecord;

  RouteHeads(const abi::GroupShape& shape, device::Launcher& launcher)
      : layout_(shape), launcher_(launcher), num_records_(shape.num_routes()) {}

  struct Standing {
    Head head{};  // handle 0: there is none
    std::uint32_t half = 0;
  };
  // The routing of each record's last dispatch before operation `next`. Routings of that operation or later
  // ones are from before a break: they are forgotten, in the arena too.
  std::vector<Standing> standing(std::uint64_t next, std::byte* arena) const;

 private:
  std::byte* half_at(std::byte* arena, std::uint32_t record, std::size_t half) const {
    return arena + layout_.routing_of(record) + layout_.half_bytes * half;
  }

  const abi::ExchangeArenaLayout layout_;
  device::Launcher& launcher_;
  const std::uint32_t num_records_;
};

}  // namespace epd::engine
