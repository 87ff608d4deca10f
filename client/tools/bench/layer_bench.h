// epbench layer: what a whole layer takes, with operations and without, beside the daemon and without it.
#pragma once

#include "kit/report.h"
#include "plan.h"

#include <string>

namespace epd::bench {

// Starts a daemon of its own, and measures before it, beside it and after it. Throws kit::ToolError. This
// process must have one thread.
// The times are of one layer (a graph's time over its number of layers), of the slowest rank of each
// iteration.
Json measure_layer(const RunPlan& plan, const std::string& program);

// Throws kit::ToolError naming the bad value and what is allowed.
void validate_layer(const RunPlan& plan);

std::string layer_text(const Json& report);

}  // namespace epd::bench
