#include "options.h"

#include "kit/error.h"
#include "kit/random.h"

#include <CLI/CLI.hpp>

#include <map>

namespace epd::bench {
namespace {

constexpr const char* kAbout =
    "Measures epd from client processes: one process per rank, results checked bit for bit against the\n"
    "reference, plain copies of the same bytes measured in the same run as the ceiling.\n"
    "Starts its own daemon with one emulated host device per rank, unless --socket names a running one.";

constexpr const char* kFooter =
    "Figures: p50_us.. of one operation, slowest rank of each iteration, from submission to the end of the\n"
    "wait; GB/s (1e9 bytes) for the busiest rank at p50. Definitions: tests/bench/README.md.\n"
    "Exit status: 0 all results correct; 1 a result was wrong or the run failed; 2 a wrong option.\n"
    "\nExamples:\n"
    "  epbench --ranks 4 --op both --tokens 128\n"
    "  epbench --op dispatch --dtype fp8 --tokens 4096 --routing zipf --json\n"
    "  epbench suite\n";

void add_daemon_options(CLI::App& app, Options& options) {
  app.add_option("--socket", options.daemon.socket, "Attach to the daemon at this socket instead");
  app.add_option("--epd", options.daemon.program, "The daemon to start (default: epd beside epbench)");
  app.add_flag("--json", options.json, "JSON, one object per line and operation, instead of a table");
}

// Any name but the allowed ones is refused with the list.
CLI::Validator one_of(const std::string& what, const std::vector<std::string>& allowed) {
  auto check = [what, allowed](std::string& value) -> std::string {
    std::string list;
    for (const std::string& name : allowed) {
      if (name == value) return "";
      list += (list.empty() ? "" : ", ") + name;
    }
    return what + " '" + value + "' is not served; allowed: " + list;
  };
  return {check, ""};
}

struct Names {
  std::string backend = "host";
  std::string operation = "both";
  std::string layout = "compact";
  std::string dtype = "bf16";
  std::string check = "some";
};

void add_run_options(CLI::App& app, Options& options, Names& names) {
  RunPlan& run = options.run;
  app.add_option("--backend", names.backend, "Devices: host (emulated, threads as SMs)")
      ->check(one_of("backend", {"host"}));
  app.add_option("--ranks", run.ranks, "Client processes, each on its own device host:r")
      ->capture_default_str();
  app.add_option("--op", names.operation, "dispatch, combine, both or noop")
      ->check(one_of("operation", {"dispatch", "combine", "both", "noop"}))
      ->capture_default_str();
  app.add_option("--layout", names.layout, "Layout of received rows: compact")
      ->check(one_of("layout", {"compact"}));
  app.add_option("--dtype", names.dtype, "What dispatch delivers: bf16 or fp8 (cast by the engine)")
      ->check(one_of("dtype", {"bf16", "fp8"}))
      ->capture_default_str();
  app.add_option("--tokens", run.tokens, "Tokens of each rank in each call")->capture_default_str();
  app.add_option("--hidden", run.hidden, "Values per token, a multiple of 128")->capture_default_str();
  app.add_option("--experts", run.experts, "Experts of the group, a multiple of the ranks")
      ->capture_default_str();
  app.add_option("--topk", run.topk, "Experts per token")->capture_default_str();
  app.add_option("--sms", run.sms, "Threads of each device to use (0: the device's default)")
      ->capture_default_str();
  app.add_option("--routing", run.routing, "uniform, zipf, group-limited, one-expert, or a routing file")
      ->capture_default_str();
  app.add_option("--iters", run.iterations, "Measured iterations, each with its own routing")
      ->capture_default_str();
  app.add_option("--warmup", run.warmup, "Iterations before these")->capture_default_str();
  app.add_option("--depth", run.depth, "Buffer slots, used in turn (memory: see README)")
      ->capture_default_str();
  app.add_option("--seed", run.seed, "Of routing and data")->capture_default_str();
  app.add_option("--check", names.check,
                 "Iterations compared with the reference: all, some (first, last, about four more), none")
      ->check(one_of("check", {"all", "some", "none"}))
      ->capture_default_str();
  app.add_flag("--weighted", run.weighted, "combine weighs rows by the top-k weights");
}

void apply(const Names& names, RunPlan& run) {
  static const std::map<std::string, Operation> kOperations{{"dispatch", Operation::kDispatch},
                                                            {"combine", Operation::kCombine},
                                                            {"both", Operation::kBoth},
                                                            {"noop", Operation::kNoop}};
  static const std::map<std::string, CheckLevel> kLevels{
      {"all", CheckLevel::kAll}, {"some", CheckLevel::kSome}, {"none", CheckLevel::kNone}};
  run.operation = kOperations.at(names.operation);
  run.check = kLevels.at(names.check);
  run.fp8 = names.dtype == "fp8";
}

void require_range(const char* name, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
  if (value >= low && value <= high) return;
  kit::fail(std::string(name) + " is " + std::to_string(value) + "; allowed: " + std::to_string(low) + ".." +
            std::to_string(high));
}

}  // namespace

bool RunPlan::checks(std::uint32_t iteration) const {
  if (check == CheckLevel::kNone) return false;
  if (check == CheckLevel::kAll || iteration == 0 || iteration + 1 == iterations) return true;
  return kit::Random(kit::derive(seed ^ 0xc4ec, iteration)).unit() * iterations < 4.0;
}

void validate(const RunPlan& plan) {
  require_range("ranks", plan.ranks, 1, 64);
  require_range("tokens", plan.tokens, 0, 65536);
  require_range("hidden", plan.hidden, 128, 16384);
  if (plan.hidden % 128 != 0) {
    kit::fail("hidden is " + std::to_string(plan.hidden) + "; allowed: multiples of 128");
  }
  require_range("experts", plan.experts, 1, 4096);
  if (plan.experts % plan.ranks != 0) {
    kit::fail("experts is " + std::to_string(plan.experts) + "; allowed: multiples of ranks, " +
              std::to_string(plan.ranks));
  }
  require_range("topk", plan.topk, 1, 32);
  require_range("iters", plan.iterations, 1, 1'000'000);
  require_range("warmup", plan.warmup, 0, 1'000'000);
  require_range("depth", plan.depth, 1, 16);
}

bool parse_options(int argc, char** argv, Options& options, int& exit_code) {
  CLI::App app(kAbout, "epbench");
  app.footer(kFooter);
  Names names;
  add_daemon_options(app, options);
  add_run_options(app, options, names);
  app.set_version_flag("--version", std::string("epbench ") + epd_version());
  CLI::App* suite = app.add_subcommand("suite", "The table of the README: ranks 1/2/4 x tokens 128/4096");
  CLI::App* attach = app.add_subcommand("attach", "Time to attach and to detach a session");
  CLI::App* reap = app.add_subcommand("reap", "Time from kill -9 of a client until its peer knows");
  for (CLI::App* command : {suite, attach, reap}) add_daemon_options(*command, options);
  suite->add_option("--iters", options.run.iterations, "Measured iterations of each row")
      ->capture_default_str();
  suite->add_option("--seed", options.run.seed, "Of routing and data")->capture_default_str();
  for (CLI::App* command : {attach, reap}) {
    command->add_option("--rounds", options.rounds, "Measurements")->capture_default_str();
  }
  app.require_subcommand(0, 1);
  try {
    app.parse(argc, argv);
    apply(names, options.run);
    if (*suite) options.command = Command::kSuite;
    if (*attach) options.command = Command::kAttach;
    if (*reap) options.command = Command::kReap;
    require_range("rounds", options.rounds, 1, 100'000);
    validate(options.run);
    return true;
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error) == 0 ? 0 : 2;
  } catch (const kit::ToolError& error) {
    std::fprintf(stderr, "epbench: %s\n", error.what());
    exit_code = 2;
  }
  return false;
}

}  // namespace epd::bench
