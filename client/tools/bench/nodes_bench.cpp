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
constexpr std::uint64_t kBatchBytes = 256 << 10;             // network.batch_bytes of the daemons
constexpr std::uint64_t kStreamBytes = std::uint64_t{16} << 20;  // compared as a stream from here on
constexpr std::uint32_t kManyTokens = 1024;

// Of one iteration.
std::uint64_t busiest_node(const kit::SharedArray<std::uint64_t>& of_ranks, std::uint32_t iteration,
                           const RunPlan& plan) {
  std::vector<std::uint64_t> nodes(plan.nodes);
  for (std::uint32_t rank = 0; rank < plan.ranks; ++rank)
    nodes[kit::place_of(rank, plan.ranks, plan.nodes).node] += of_ranks[std::size_t{iteration} * plan.ranks + rank];
  return *std::max_element(nodes.begin(), nodes.end());
}

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
  RunContext context{run, {}, "epbench-nodes-" + std::to_string(run.tokens),
                     kit::RoutingSource(run.routing_spec())};
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

RunPlan NodesPlan::run_of(std::uint32_t with_tokens) const {
  RunPlan made = run;
  made.ranks = run.nodes * ranks_per_node;
  made.tokens = with_tokens;
  made.iterations = pairs * (pair_iterations != 0 ? pair_iterations : with_tokens >= kManyTokens ? 3 : 20);
  if (made.sum_ranks == 0) made.sum_ranks = ranks_per_node;
  return made;
}

void NodesPlan::validate() const {
  require_range("nodes", run.nodes, 1, kit::NodeNetwork::kMaxNodes);
  require_range("ranks-per-node", ranks_per_node, 1, 64);
  require_range("pairs", pairs, 1, 1000);
  require_range("iters", pair_iterations, 0, 100'000);
  kit::bits_per_second(rate);
  for (const std::uint32_t each : tokens) bench::validate(run_of(each));
}

std::vector<NodesReport> measure_nodes(const NodesPlan& plan, const std::string& program) {
  kit::OwnNodes nodes({.program = program,
                       .nodes = plan.run.nodes,
                       .devices = plan.ranks_per_node,
                       .sms = plan.run.sms,
                       .rate = plan.rate});
  std::vector<NodesReport> reports;
  try {
    std::string no_raw = plan.run.nodes == 1 ? "one node has no link" : RawUcx::why_not();
    std::optional<RawUcx> raw;
    if (no_raw.empty()) raw.emplace(nodes, kBatchBytes);
    for (const std::uint32_t tokens : plan.tokens) {
      const RunPlan run = plan.run_of(tokens);
      Samples samples(run.iterations, run.ranks, std::size_t{run.iterations} * kNoopsBetween,
                      run.ranks * kit::targets_per_rank(run.params()));
      measure(plan, run, nodes, raw ? &*raw : nullptr, samples);
      for (const char* operation : {"dispatch", "combine"}) {
        reports.push_back(make_nodes_report(operation, plan, run, samples));
        reports.back().no_raw = no_raw;
      }
    }
  } catch (const kit::ToolError& error) {
    kit::fail(error.what() + nodes.log_tail());
  }
  const std::string outcome = nodes.stop();
  if (!outcome.empty()) kit::fail(outcome);
  return reports;
}

NodesReport make_nodes_report(const std::string& operation, const NodesPlan& plan, const RunPlan& run,
                              const Samples& samples) {
  const bool dispatch = operation == "dispatch";
  const OperationSamples& measured = dispatch ? samples.dispatch : samples.combine;
  NodesReport report;
  report.operation = operation;
  report.plan = run;
  report.rate = plan.rate;
  report.daemon = samples.daemon.data();
  report.cores = static_cast<std::uint32_t>(::sysconf(_SC_NPROCESSORS_ONLN));
  const std::vector<double> times = kit::slowest_rank(measured.time_us.span(), run.ranks);
  report.time = kit::summarize(times);
  report.noop_p50_us = kit::summarize(samples.noop_us.span()).p50;
  for (const std::uint64_t bytes : measured.link_bytes.span()) report.link_bytes += bytes;
  std::uint64_t announcements = 0;
  for (std::size_t i = 0; i < measured.needed_bytes.size(); ++i) {
    report.needed_bytes += measured.needed_bytes[i];
    announcements += measured.needed_bytes[i] - measured.record_bytes[i];
    report.asked_bytes += measured.request_bytes[i];
  }
  report.asked_bytes -= announcements;
  const std::uint32_t each = run.iterations / plan.pairs;
  for (std::uint32_t pair = 0; pair < plan.pairs; ++pair) {
    const double us = kit::quantile(std::span(times).subspan(std::size_t{pair} * each, each), 0.5);
    const auto bytes = static_cast<double>(busiest_node(measured.record_bytes, (pair + 1) * each - 1, run));
    const double trip = dispatch ? samples.raw_dispatch_us[pair] : samples.raw_combine_us[pair];
    if (samples.raw_stream_mibps[pair] > 0 && us > 0) {
      report.own_mibps.push_back(bytes / us * 1e6 / (1 << 20));
      report.raw_mibps.push_back(samples.raw_stream_mibps[pair]);
    } else if (trip > 0) {
      report.own_us.push_back(us);
      report.raw_us.push_back(trip);
    }
  }
  const double bits = kit::bits_per_second(plan.rate);
  const auto needed = static_cast<double>(busiest_node(measured.needed_bytes, run.iterations - 1, run));
  if (bits > 0) report.link_us = needed * 8 / bits * 1e6;
  report.correct = true;
  for (const Verdict& verdict : measured.verdicts.span()) {
    report.checks += verdict.checks;
    if (verdict.failures == 0) continue;
    if (report.correct) report.first_difference = verdict.first;
    report.correct = false;
  }
  return report;
}

}  // namespace epd::bench
