// The SMs of a daemon's GPUs, changed by epctl while ranks measure.
#pragma once

#include "plan.h"

#include <cstdint>
#include <string>

namespace epd::bench {

// One thread; everything throws kit::ToolError.
class SmsChanges {
 public:
  // Does nothing if the plan has no changes.
  SmsChanges(const RunPlan& plan, std::string control_socket);
  // `done`: of the plan's iterations, warm-up included. Makes the next change if it is due, spread evenly.
  void follow(std::uint32_t done);
  // Changes of each GPU's SMs until now.
  std::uint32_t made() const { return made_; }

 private:
  const RunPlan& plan_;
  const std::string control_socket_;
  std::uint32_t made_ = 0;
};

}  // namespace epd::bench
