// The command line of epbench.
#pragma once

#include "nodes_bench.h"
#include "plan.h"

#include <cstdint>
#include <string>

namespace epd::bench {

enum class Command { kRun, kSuite, kAttach, kReap, kNodes, kLayer };

struct Options {
  Command command = Command::kRun;
  RunPlan run;
  NodesPlan nodes;
  DaemonPlan daemon;
  bool json = false;
  bool small_suite = false;
  std::uint32_t rounds = 100;  // of attach and reap
  RunPlan layer;               // of epbench layer, which becomes `run`
};

// Prints help or the reason and returns the exit code in `exit_code` (0 for --help) when there is nothing
// to run.
bool parse_options(int argc, char** argv, Options& options, int& exit_code);

}  // namespace epd::bench
