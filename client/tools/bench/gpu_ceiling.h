// What the links between GPUs give plain copies: every GPU to or from all others at once, from memory to
// memory.
#pragma once

#include "plan.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::bench {

// GB/s (1e9) of each GPU: its bytes over the slowest GPU's time, p50. 0: not measured.
struct GpuCeiling {
  double push = 0;         // bulk stores to peers by SMs
  double pull = 0;         // bulk loads from peers by SMs
  double copy_engine = 0;  // copies to peers
  std::string why_not;     // why there is no measurement
};

// For each plan with the bytes that its busiest rank sends to others (push, copy engine) and pulls from them
// in its first iteration, by as many CTAs as the plan has SMs and by 24; the faster counts. In a process of
// its own. The plans' `gpus` are set. Never fails: what can't be measured says why.
std::vector<GpuCeiling> measure_ceilings(const std::vector<RunPlan>& plans);

}  // namespace epd::bench
