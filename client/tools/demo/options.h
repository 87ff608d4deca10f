// The command line of epd-moe-demo.
#pragma once

#include "plan.h"

namespace epd::demo {

// Prints help or an error, and sets the exit code (0 for --help), if there is nothing to run.
bool parse_options(int argc, char** argv, DemoPlan& plan, int& exit_code);

}  // namespace epd::demo
