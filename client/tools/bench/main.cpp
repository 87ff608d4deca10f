// epbench: see README.md and --help.
#include "benchmarks.h"
#include "gpu_driver.h"
#include "kit/error.h"
#include "kit/session.h"
#include "operation_report.h"
#include "options.h"
#include "plan.h"
#include "worker.h"

#include <algorithm>
#include <cstdio>

namespace epd::bench {
namespace {

using kit::all_correct;
using kit::Style;

// Whether all results were correct.
bool print(const Reports& reports, bool json, const std::string& text) {
  for (const Json& report : reports) {
    if (json) std::printf("%s\n", report.dump().c_str());
  }
  if (!json) std::fputs(text.c_str(), stdout);
  return all_correct(reports);
}

// The plan of the operations; empty for other commands.
std::vector<SuiteRun> runs_of(const Options& options) {
  if (options.command == Command::kSuite) return suite_runs(options.run, options.small_suite);
  if (options.command == Command::kRun) return {{options.run, "epbench"}};
  return {};
}

std::vector<GpuCeiling> ceilings_of(const std::vector<SuiteRun>& runs) {
  std::vector<RunPlan> plans;
  for (const SuiteRun& run : runs) {
    if (run.plan.on_gpus()) plans.push_back(run.plan);
  }
  return measure_ceilings(plans);
}

struct Outcome {
  Reports reports;
  std::uint32_t failures = 0;  // runs without reports
};

// A suite continues once after a run that did not finish, because GPU time is expensive.
Outcome run_all(const std::vector<SuiteRun>& runs, const std::vector<GpuCeiling>& ceilings,
                const kit::OwnDaemon& daemon) {
  constexpr std::uint32_t kMostFailures = 2;
  Outcome outcome;
  for (std::size_t i = 0; i < runs.size() && outcome.failures < kMostFailures; ++i) {
    const double begin = kit::now_us();
    try {
      const auto samples = run_ranks(runs[i].plan, daemon, runs[i].label);
      for (Json& report :
           make_reports(runs[i].plan, *samples, i < ceilings.size() ? ceilings[i] : GpuCeiling()))
        outcome.reports.push_back(std::move(report));
    } catch (const kit::ToolError& error) {
      if (runs.size() == 1) throw;
      ++outcome.failures;
      std::fprintf(stderr, "epbench: %s: %s%s\n", runs[i].label.c_str(), error.what(),
                   daemon.log_tail().c_str());
    }
    if (runs.size() > 1) {
      std::fprintf(stderr, "%s: %zu of %zu runs, %.1f s\n", runs[i].label.c_str(), i + 1, runs.size(),
                   (kit::now_us() - begin) * 1e-6);
    }
  }
  return outcome;
}

bool run(const Options& options, const std::vector<SuiteRun>& runs, const std::vector<GpuCeiling>& ceilings,
         const kit::OwnDaemon& daemon) {
  switch (options.command) {
    case Command::kRun:
    case Command::kSuite: {
      const Outcome outcome = run_all(runs, ceilings, daemon);
      const Style style = options.command == Command::kSuite ? Style::kMarkdown : Style::kPlain;
      return print(outcome.reports, options.json, to_text(outcome.reports, style)) && outcome.failures == 0;
    }
    case Command::kAttach: {
      const Reports reports = measure_attach(daemon, options.rounds);
      return print(reports, options.json, lifecycle_text(reports));
    }
    case Command::kReap: {
      const Reports reports = measure_reap(daemon, options.rounds);
      return print(reports, options.json, lifecycle_text(reports));
    }
    case Command::kNodes:
    case Command::kLayer: break;  // without this daemon
  }
  return false;
}

std::uint32_t devices_for(const Options& options) {
  switch (options.command) {
    case Command::kRun: return options.run.ranks;
    case Command::kSuite: return options.run.on_gpus() ? options.run.ranks : kSuiteRanks;
    case Command::kAttach: return 1;
    case Command::kReap: return 2;
    case Command::kLayer: return options.run.ranks;
    case Command::kNodes: break;
  }
  return 1;
}

// Ranks lie in turn on the GPUs that there are.
kit::DaemonOptions find_devices(Options& options) {
  RunPlan& run = options.run;
  const std::uint32_t wanted = devices_for(options);
  kit::DaemonOptions daemon{.socket = options.daemon.socket,
                            .program = options.daemon.program,
                            .host_devices = wanted,
                            .sms = run.sms};
  if (!run.on_gpus()) return daemon;
  if (run.sms == 0) run.sms = kDefaultGpuSms;
  const std::uint32_t found = count_gpus();
  run.gpus = std::min(found, wanted);
  if (found < wanted)
    std::fprintf(stderr, "epbench: %u ranks share %u %s\n", wanted, found, found == 1 ? "GPU" : "GPUs");
  daemon.host_devices = 0;
  daemon.cuda_devices = run.gpus;
  daemon.sms = run.sms;
  daemon.linger_us = run.linger_us;
  return daemon;
}

int run_tool(Options& options) {
  try {
    if (options.command == Command::kNodes) {
      const Reports reports = measure_nodes(options.nodes, options.daemon.program);
      return print(reports, options.json, nodes_text(reports)) ? 0 : 1;
    }
    kit::DaemonOptions devices = find_devices(options);
    if (options.command == Command::kLayer) {
      const Json report = measure_layer(options.run, options.daemon.program);
      return print({report}, options.json, layer_text(report)) ? 0 : 1;
    }
    const std::vector<SuiteRun> runs = runs_of(options);
    for (const SuiteRun& each : runs) {
      validate(each.plan);
      devices.sms = std::max(devices.sms, each.plan.sms);
    }
    const std::vector<GpuCeiling> ceilings = ceilings_of(runs);  // before the daemon's engines are there
    kit::OwnDaemon daemon(devices);
    bool correct = false;
    try {
      correct = run(options, runs, ceilings, daemon);
    } catch (const kit::ToolError& error) {
      std::fprintf(stderr, "epbench: %s%s\n", error.what(), daemon.log_tail().c_str());
      return 1;
    }
    if (const std::string outcome = daemon.stop(); !outcome.empty()) kit::fail(outcome);
    return correct ? 0 : 1;
  } catch (const kit::ToolError& error) {
    std::fprintf(stderr, "epbench: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace epd::bench

int main(int argc, char** argv) {
  epd::bench::Options options;
  int exit_code = 0;
  if (!epd::bench::parse_options(argc, argv, options, exit_code)) return exit_code;
  return epd::bench::run_tool(options);
}
