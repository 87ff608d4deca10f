#include "nodes_bench.h"

#include "kit/error.h"
#include "kit/nodes.h"
#include "kit/team.h"
#include "raw_ucx.h"
#include "worker.h"

#include <cstdio>

#include <unistd.h>

namespace epd::bench {
namespace {

constexpr std::chrono::seconds kRunLimit{900};
constexpr std::uint64_t kBatchBytes = 256 << 10;                 // network.batch_bytes of the daemons
constexpr std::uint64_t kStreamBytes = std::uint64_t{16} << 20;  // compared as a stream from here on

double round_trip_us(const RawUcx& raw, const OperationSamples& samples, std::uint32_t iteration,
                     const RunPlan& plan) {
  return raw.one_way_us(busiest_node(samples.request_bytes, iteration, plan)) +
         raw.one_way_us(busiest_node(samples.record_bytes, iteration, plan));
}

void measure_raw(const RawUcx& raw, const RunPlan& plan, std::uint32_t pair, std::uint32_t iterations,
                 Samples& samples) {
  const std::uint32_t last = (pair + 1) * iterations - 1;
  const std::uint64_t bytes = busiest_node(samples.dispatch.record_bytes, last, plan);
  if (bytes >= kStreamBytes) {
    samples.raw_stream_mibps[pair] = raw.stream_mibps(bytes * iterations);
  } else {
    samples.raw_dispatch_us[pair] = round_trip_us(raw, samples.dispatch, last, plan);
    samples.raw_combine_us[pair] = round_trip_us(raw, samples.combine, last, plan);
  }
}

void measure(const NodesPlan& plan, const RunPlan& run, const kit::OwnNodes& nodes, const RawUcx* raw,
             Samples& samples) {
  RunContext context{
      run, {}, "epbench-nodes-" + std::to_string(run.tokens), kit::RoutingSource(run.routing_spec())};
  for (std::uint32_t node = 0; node < nodes.size(); ++node)
    context.sockets.push_back(nodes.daemon(node).socket());
  context.samples = &samples;
  context.nodes = &nodes;
  context.iterations_of_pair = run.iterations / plan.pairs;
  if (raw != nullptr) {
    context.after_pair = [&](std::uint32_t pair) {
      measure_raw(*raw, run, pair, context.iterations_of_pair, samples);
    };
  }
  kit::Team team(run.ranks);
  kit::Team::Options options;
  options.limit = kRunLimit;
  options.daemons = nodes.pids();
  team.run([&context](kit::TeamRank& self) { Worker(context, self).run(); }, options);
}

}  // namespace

Reports measure_nodes(const NodesPlan& plan, const std::string& program) {
  kit::OwnNodes nodes({.program = program,
                       .nodes = plan.run.nodes,
                       .devices = plan.ranks_per_node,
                       .sms = plan.run.sms,
                       .rate = plan.rate,
                       .check = plan.check});
  Reports reports;
  try {
    std::string no_raw = plan.run.nodes == 1 ? "one node has no link" : RawUcx::why_not();
    std::optional<RawUcx> raw;
    if (no_raw.empty()) raw.emplace(nodes, kBatchBytes);
    for (const std::uint32_t tokens : plan.tokens) {
      const RunPlan run = plan.run_of(tokens);
      Samples samples(run.iterations, run.ranks, std::size_t{run.iterations} * kNoopsBetween,
                      run.ranks * kit::targets_per_rank(run.params()));
      measure(plan, run, nodes, raw ? &*raw : nullptr, samples);
      for (const char* operation : {"dispatch", "combine"})
        reports.push_back(make_nodes_report(operation, plan, run, samples, no_raw));
    }
  } catch (const kit::ToolError& error) {
    kit::fail(error.what() + nodes.log_tail());
  }
  const std::string outcome = nodes.stop();
  if (!outcome.empty()) kit::fail(outcome);
  return reports;
}

}  // namespace epd::bench
