// What is reported of operations: times, and the bytes that moved, beside plain copies of the same bytes.
#pragma once

#include "gpu_ceiling.h"
#include "kit/report.h"
#include "plan.h"
#include "samples.h"

namespace epd::bench {

// Of a run that has ended; one report for each operation.
Reports make_reports(const RunPlan& plan, const Samples& samples, const GpuCeiling& ceiling);
// All reports are of one backend.
std::string to_text(const Reports& reports, kit::Style style);

// Of an operation beside a GEMM, in the stream; the median of the slowest rank's, us.
struct OverlapTimes {
  double operation = 0;    // alone
  double gemm = 0;         // alone
  double serial = 0;       // the one after the other
  double overlapped = 0;   // the operation begun, the GEMM, then the wait for the operation
  double gemm_beside = 0;  // of this, the GEMM
  // Of the operation's time, what is hidden.
  double efficiency() const { return operation > 0 ? (serial - overlapped) / operation : 0; }
  double slowdown() const { return gemm > 0 ? gemm_beside / gemm : 0; }
};

}  // namespace epd::bench
