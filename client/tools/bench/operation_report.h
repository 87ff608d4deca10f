#pragma once

#include "kit/report.h"
#include "plan.h"
#include "samples.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::bench {

// The rates that the links between GPUs give to plain copies, every GPU to or from all others at once, from
// memory to memory: GB/s (1e9) of each GPU, its bytes over the slowest GPU's time, p50. 0: not measured.
struct GpuCeiling {
  double push = 0;         // bulk stores to peers by SMs
  double pull = 0;         // bulk loads from peers by SMs
  double copy_engine = 0;  // copies to peers
  std::string why_not;     // why there is no measurement
};

// Measures for each plan with the bytes that its busiest rank sends to others (push, copy engine) and pulls
// from them in its first iteration, with as many CTAs as the plan has SMs and with 24; the faster counts.
// Runs in a process of its own. The plans' `gpus` are set. Never fails: a part that can't be measured says
// why.
std::vector<GpuCeiling> measure_ceilings(const std::vector<RunPlan>& plans);

// Reports of a run that has ended, one for each operation: times, and the bytes that moved, beside plain
// copies of the same bytes.
Reports make_reports(const RunPlan& plan, const Samples& samples, const GpuCeiling& ceiling);
// All reports are of one backend.
std::string to_text(const Reports& reports, kit::Style style);

// Times of an operation beside a GEMM, in the stream; the median of the slowest rank's, us.
struct OverlapTimes {
  double operation = 0;    // alone
  double gemm = 0;         // alone
  double serial = 0;       // the one after the other
  double overlapped = 0;   // the operation begun, the GEMM, then the wait for the operation
  double gemm_beside = 0;  // of this, the GEMM
  // The share of the operation's time that is hidden.
  double efficiency() const { return operation > 0 ? (serial - overlapped) / operation : 0; }
  double slowdown() const { return gemm > 0 ? gemm_beside / gemm : 0; }
};

}  // namespace epd::bench
