// The fixed sets of runs behind the tables in kernels/PERFORMANCE.md.
#pragma once

#include "plan.h"

#include <string>
#include <vector>

namespace epd::bench {

struct SuiteRun {
  RunPlan plan;
  std::string label;  // for the progress line
};

// Backend host: ranks 1/2/4 x (tokens 128/4096 x (dispatch bf16, combine bf16, dispatch fp8), noop, layout
// expert at 128 and packed at 4096 tokens, dispatch and combine each); H 7168, E 256, K 8. Backend cuda: the
// same H, E, K; the plan's ranks: noop, compact 4096 tokens with 24 and with 8 SMs, 8192 tokens, zipf, expert
// at 128 tokens, packed at 4096; 2 ranks at 4096. Iterations, seed and devices are the plan's. `small`: fewer
// tokens, smaller rows.
std::vector<SuiteRun> suite_runs(const RunPlan& plan, bool small);
inline constexpr std::uint32_t kSuiteRanks = 4;

}  // namespace epd::bench
