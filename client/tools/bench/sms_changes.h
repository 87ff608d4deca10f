// The SMs of a daemon's GPUs, changed by epctl while ranks measure, and how long resident kernels took to
// stop.
#pragma once

#include "plan.h"

#include <cstdint>
#include <string>

namespace epd::bench {

// As the daemon counts them: of all GPUs, from telling a kernel to stop until its engine saw that it had.
struct KernelStops {
  std::uint32_t changes = 0;  // of each GPU's SMs
  std::uint64_t count = 0;
  std::uint64_t p50_us = 0;  // good to a quarter
  std::uint64_t max_us = 0;
};

// One thread; everything throws kit::ToolError.
class SmsChanges {
 public:
  // Does nothing if the plan has no changes.
  SmsChanges(const RunPlan& plan, std::string control_socket);
  // `done`: of the plan's iterations, warm-up included. Makes the next change if it is due, spread evenly.
  void follow(std::uint32_t done);
  // Empty without changes. Asks the daemon.
  KernelStops kernel_stops() const;

 private:
  const RunPlan& plan_;
  const std::string control_socket_;
  std::uint32_t made_ = 0;
};

}  // namespace epd::bench
