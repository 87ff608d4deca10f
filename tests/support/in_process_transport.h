// Transports within one process. For tests, and for engines that share one.
#pragma once

#include "transport/transport.h"

#include <memory>

namespace epd::transport {

struct Hub;  // in_process.cpp

// Transports of one network can reach each other. Threads: any; each transport belongs to one.
class Network {
 public:
  Network();
  Result<std::unique_ptr<Transport>> open(const Limits& limits);

 private:
  std::shared_ptr<Hub> hub_;  // lives as long as the last transport
};

}  // namespace epd::transport
