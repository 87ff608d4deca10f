// What people want to know of far engines: their names, and what is counted of each.
#pragma once

#include "far/port.h"
#include "proto/far_statistics.h"

#include <string>

namespace epd::far {

class Ledger {
 public:
  virtual ~Ledger() = default;
  // Good until the next call.
  virtual abi::FarCounters& counters(EngineId engine) = 0;
  // "node-b"
  virtual std::string node_name(EngineId engine) const = 0;
};

}  // namespace epd::far
