#include "coordinator.h"

#include "kit/error.h"
#include "kit/team.h"
#include "worker.h"

#include <algorithm>
#include <cstdio>

#include <unistd.h>

namespace epd::bench {
namespace {

constexpr std::chrono::seconds kRunLimit{900};

// A new name for each run: groups of earlier runs may still be ending.
std::string next_group_name() {
  static int number = 0;
  return "epbench-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
}

std::size_t noop_count(const RunPlan& plan) {
  if (plan.on_gpus()) {
    const std::uint32_t each =
        plan.operation == Operation::kNoop ? kStreamNoopsPerIteration : kStreamNoopsBetween;
    return std::size_t{plan.iterations} * plan.ranks * each;
  }
  if (plan.operation != Operation::kNoop) return std::size_t{plan.iterations} * kNoopsBetween;
  return std::size_t{plan.iterations} * plan.ranks * kNoopsPerIteration;
}

}  // namespace

std::unique_ptr<Samples> run_ranks(const RunPlan& plan, const kit::OwnDaemon& daemon,
                                   const std::string& label) {
  validate(plan);
  const std::uint32_t targets = plan.ranks * kit::targets_per_rank(plan.params());
  auto samples = std::make_unique<Samples>(plan.iterations, plan.ranks, noop_count(plan), targets);
  const bool no_ceiling = plan.operation == Operation::kNoop || plan.on_gpus();
  kit::CopyCeiling ceiling(plan.params(), no_ceiling ? 0 : plan.tokens);
  const BarrierWords start_barrier(plan.ranks);
  RunContext context{plan, {daemon.socket()}, next_group_name(), kit::RoutingSource(plan.routing_spec())};
  context.ceiling = &ceiling;
  context.samples = samples.get();
  context.start_barrier = &start_barrier;
  const kit::ProgressLine progress(label, plan.warmup + plan.iterations);
  kit::Team team(plan.ranks);
  kit::Team::Options options;
  options.limit = kRunLimit;
  if (daemon.pid() > 0) options.daemons = {daemon.pid()};
  options.on_progress = [&](std::uint32_t done) { progress.show(done); };
  team.run([&context](kit::TeamRank& self) { Worker(context, self).run(); }, options);
  return samples;
}

}  // namespace epd::bench
