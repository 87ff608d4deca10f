// What people want to know of far engines: their names, and what is counted of each.
#pragma once

#include "far/judge.h"
#include "far/port.h"
#include "proto/far_statistics.h"

#include <string>

namespace epd::far {

class Ledger {
 public:
  virtual ~Ledger() = default;
  // Good until the next call.
  virtual abi::FarCounters& counters(EngineId engine) = 0;
  // So many messages of that engine were dropped.
  virtual void dropped(EngineId engine, Drop why, std::uint64_t times = 1) {
    abi::count(counters(engine).dropped[static_cast<std::uint32_t>(why)], times);
  }
  // "node-b"
  virtual std::string node_name(EngineId engine) const = 0;
};

}  // namespace epd::far
