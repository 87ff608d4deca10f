// Runs ranks.
#pragma once

#include "kit/daemon.h"
#include "plan.h"
#include "samples.h"

#include <memory>
#include <string>

namespace epd::bench {

// One run with fresh rank processes, and what they measured. Throws kit::ToolError if it did not finish. This
// process must have one thread. `label`: for the progress line, shown on a terminal only.
std::unique_ptr<Samples> run_ranks(const RunPlan& plan, const kit::OwnDaemon& daemon,
                                   const std::string& label);

}  // namespace epd::bench
