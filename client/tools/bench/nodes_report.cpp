// Plans and figures of groups that span nodes, and their table.
#include "kit/nodes.h"
#include "nodes_bench.h"
#include "report_parts.h"

#include <algorithm>
#include <span>

#include <unistd.h>

namespace epd::bench {
namespace {

double median(const std::vector<double>& values) {
  return kit::quantile(values, 0.5);
}

constexpr std::uint32_t kManyTokens = 1024;
// A client that waits, its engine's loop and the engine's proxy.
constexpr std::uint32_t kPollingThreads = 3;

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
  require_range("ranks-per-node", ranks_per_node, 1, kMaxRanks);
  require_range("pairs", pairs, 1, kMaxPairs);
  require_range("iters", pair_iterations, 0, kMaxPairIterations);
  kit::bits_per_second(rate);
  for (const std::uint32_t each : tokens) bench::validate(run_of(each));
}

std::uint64_t busiest_node(const kit::SharedArray<std::uint64_t>& of_ranks, std::uint32_t iteration,
                           const RunPlan& plan) {
  std::vector<std::uint64_t> nodes(plan.nodes);
  for (std::uint32_t rank = 0; rank < plan.ranks; ++rank)
    nodes[kit::place_of(rank, plan.ranks, plan.nodes).node] +=
        of_ranks[std::size_t{iteration} * plan.ranks + rank];
  return *std::max_element(nodes.begin(), nodes.end());
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
  add_verdicts(measured, report);
  return report;
}

double NodesReport::link_bytes_over_needed() const {
  return needed_bytes != 0 ? static_cast<double>(link_bytes) / static_cast<double>(needed_bytes) : 0;
}

std::vector<double> NodesReport::shares() const {
  std::vector<double> shares;
  for (std::size_t i = 0; i < raw_mibps.size(); ++i) shares.push_back(own_mibps[i] / raw_mibps[i]);
  return shares;
}

double NodesReport::added_us() const {
  std::vector<double> added;
  for (std::size_t i = 0; i < raw_us.size(); ++i) added.push_back(own_us[i] - raw_us[i]);
  return median(added);
}

std::string NodesReport::bound() const {
  if (link_us > time.p50 / 2) return "link";
  const std::uint32_t threads = kPollingThreads * plan.ranks;
  return threads > cores ? format("processors: %u threads that poll, %u cores", threads, cores) : "hand-offs";
}

std::string to_json(const NodesReport& report) {
  const RunPlan& plan = report.plan;
  Json json{
      {"op", report.operation},
      {"nodes", plan.nodes},
      {"ranks", plan.ranks},
      {"sum_ranks", plan.sum_ranks},
      {"tokens", plan.tokens},
      {"hidden", plan.hidden},
      {"topk", plan.topk},
      {"experts", plan.experts},
      {"rows", plan.mode()},
      {"routing", plan.routing},
      {"seed", plan.seed},
      {"rate", report.rate},
      {"iters", plan.iterations},
      {"p50_us", report.time.p50},
      {"p90_us", report.time.p90},
      {"p99_us", report.time.p99},
      {"noop_p50_us", report.noop_p50_us},
      {"link_bytes", report.link_bytes},
      {"needed_bytes", report.needed_bytes},
      {"asked_bytes", report.asked_bytes},
      {"link_bytes_over_needed", report.needed_bytes != 0 ? Json(report.link_bytes_over_needed()) : Json()}};
  if (!report.no_raw.empty()) json["no_raw"] = report.no_raw;
  if (!report.raw_mibps.empty()) {
    json["own_mibps"] = median(report.own_mibps);
    json["raw_mibps"] = median(report.raw_mibps);
    json["shares"] = report.shares();
    json["share_of_raw"] = median(report.shares());
  }
  if (!report.raw_us.empty()) {
    json["raw_round_trip_us"] = median(report.raw_us);
    json["added_us"] = report.added_us();
  }
  json["bound"] = report.bound();
  json["cores"] = report.cores;
  json["checks"] = report.checks;
  json["correct"] = report.correct;
  append_difference(report, json);
  json["daemon"] = report.daemon;
  return json.dump();
}

std::string to_table(const std::vector<NodesReport>& reports) {
  if (reports.empty()) return "";
  const RunPlan& plan = reports.front().plan;
  std::string text =
      format("%u nodes x %u ranks, link %s, H=%u E=%u K=%u, %s, sums of %u ranks; %s\n", plan.nodes,
             plan.ranks / plan.nodes,
             reports.front().rate.empty() ? "unshaped" : reports.front().rate.c_str(), plan.hidden,
             plan.experts, plan.topk, plan.mode().c_str(), plan.sum_ranks, reports.front().daemon.c_str());
  text += format("%-9s %6s %10s %10s %12s %8s %10s %10s %9s  %-9s  %s\n", "op", "tokens", "p50 us", "p99 us",
                 "link bytes", "/needed", "raw MiB/s", "raw us", "of raw", "result", "bound by");
  for (const NodesReport& report : reports) {
    const double operations = report.plan.iterations;
    text += format("%-9s %6u %10.1f %10.1f %12.0f ", report.operation.c_str(), report.plan.tokens,
                   report.time.p50, report.time.p99, static_cast<double>(report.link_bytes) / operations);
    text +=
        report.needed_bytes != 0 ? format("%8.4f ", report.link_bytes_over_needed()) : format("%8s ", "-");
    if (!report.raw_mibps.empty()) {
      text += format("%10.0f %10s %9.3f ", median(report.raw_mibps), "-", median(report.shares()));
    } else if (!report.raw_us.empty()) {
      text += format("%10s %10.1f %+6.0f us ", "-", median(report.raw_us), report.added_us());
    } else {
      text += format("%10s %10s %9s ", "-", "-", "-");
    }
    text += format(" %-9s  %s\n", verdict_of(report.correct, report.checks).c_str(), report.bound().c_str());
  }
  text +=
      "link bytes: of an operation, all nodes, by the interfaces' counters. of raw: share of ucx_perftest's\n"
      "stream, or time added to its round trip of the same bytes; medians of pairs.\n";
  if (!reports.front().no_raw.empty()) text += "Raw UCX was not measured: " + reports.front().no_raw + ".\n";
  append_differences(reports, text);
  return text;
}

}  // namespace epd::bench
