// The fixed set of runs behind the table in the README.
#pragma once

#include "coordinator.h"

#include <vector>

namespace epd::bench {

// ranks 1/2/4 x (tokens 128/4096 x (dispatch bf16, combine bf16, dispatch fp8), noop, layout expert at 128
// and packed at 4096 tokens, dispatch and combine each); H 7168, E 256, K 8. Iterations and seed are the
// plan's.
std::vector<Report> run_suite(const RunPlan& plan, const Daemon& daemon);
inline constexpr std::uint32_t kSuiteDevices = 4;

}  // namespace epd::bench
