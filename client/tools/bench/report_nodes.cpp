// Figures of groups that span nodes, and their table.
#include "nodes_bench.h"

#include <cstdio>

#include <nlohmann/json.hpp>

namespace epd::bench {
namespace {

using Json = nlohmann::ordered_json;

std::string format(const char* pattern, auto... values) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

double median(const std::vector<double>& values) {
  return kit::quantile(values, 0.5);
}

// A client that waits, its engine's loop and the engine's proxy.
constexpr std::uint32_t kPollingThreads = 3;

std::string verdict(const NodesReport& report) {
  if (!report.correct) return "WRONG";
  return report.checks != 0 ? "bit-exact" : "unchecked";
}

}  // namespace

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
  Json json{{"op", report.operation},
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
  if (!report.first_difference.empty()) json["first_difference"] = report.first_difference;
  json["daemon"] = report.daemon;
  return json.dump();
}

std::string to_table(const std::vector<NodesReport>& reports) {
  if (reports.empty()) return "";
  const RunPlan& plan = reports.front().plan;
  std::string text = format("%u nodes x %u ranks, link %s, H=%u E=%u K=%u, %s, sums of %u ranks; %s\n",
                            plan.nodes, plan.ranks / plan.nodes,
                            reports.front().rate.empty() ? "unshaped" : reports.front().rate.c_str(),
                            plan.hidden, plan.experts, plan.topk, plan.mode().c_str(), plan.sum_ranks,
                            reports.front().daemon.c_str());
  text += format("%-9s %6s %10s %10s %12s %8s %10s %10s %9s  %-9s  %s\n", "op", "tokens", "p50 us", "p99 us",
                 "link bytes", "/needed", "raw MiB/s", "raw us", "of raw", "result", "bound by");
  for (const NodesReport& report : reports) {
    const double operations = report.plan.iterations;
    text += format("%-9s %6u %10.1f %10.1f %12.0f ", report.operation.c_str(), report.plan.tokens,
                   report.time.p50, report.time.p99, static_cast<double>(report.link_bytes) / operations);
    text += report.needed_bytes != 0 ? format("%8.4f ", report.link_bytes_over_needed()) : format("%8s ", "-");
    if (!report.raw_mibps.empty()) {
      text += format("%10.0f %10s %9.3f ", median(report.raw_mibps), "-", median(report.shares()));
    } else if (!report.raw_us.empty()) {
      text += format("%10s %10.1f %+6.0f us ", "-", median(report.raw_us), report.added_us());
    } else {
      text += format("%10s %10s %9s ", "-", "-", "-");
    }
    text += format(" %-9s  %s\n", verdict(report).c_str(), report.bound().c_str());
  }
  text += "link bytes: of an operation, all nodes, by the interfaces' counters. of raw: share of ucx_perftest's\n"
          "stream, or time added to its round trip of the same bytes; medians of pairs.\n";
  if (!reports.front().no_raw.empty()) text += "Raw UCX was not measured: " + reports.front().no_raw + ".\n";
  for (const NodesReport& report : reports) {
    if (!report.first_difference.empty()) text += "first difference: " + report.first_difference + "\n";
  }
  return text;
}

}  // namespace epd::bench
