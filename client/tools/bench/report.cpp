#include "report.h"

#include "kit/ceiling.h"
#include "report_parts.h"

#include <algorithm>
#include <span>

namespace epd::bench {
namespace {

struct Rows {
  double busiest = 0;
  double mean = 0;
};

// Means over iterations of the busiest rank's rows and of the ranks' mean.
Rows rows_of(std::span<const std::uint32_t> rows, std::uint32_t ranks) {
  Rows total;
  const std::size_t iterations = rows.size() / ranks;
  for (std::size_t i = 0; i < iterations; ++i) {
    const auto line = rows.subspan(i * ranks, ranks);
    total.busiest += *std::max_element(line.begin(), line.end());
    for (const std::uint32_t value : line) total.mean += static_cast<double>(value) / ranks;
  }
  return {total.busiest / static_cast<double>(iterations), total.mean / static_cast<double>(iterations)};
}

// Bytes per microsecond are MB/s.
double gbps(double bytes, double us) {
  return us > 0 ? bytes / us * 1e-3 : 0;
}

Report report_operation(const char* name, const RunPlan& plan, const Samples& samples) {
  const bool dispatch = std::string(name) == "dispatch";
  const OperationSamples& measured = dispatch ? samples.dispatch : samples.combine;
  Report report;
  report.operation = name;
  report.plan = plan;
  report.daemon = samples.daemon.data();
  report.time = kit::summarize(kit::slowest_rank(measured.time_us.span(), plan.ranks));
  report.noop = kit::summarize(samples.noop_us.span());
  if (!plan.on_gpus()) {
    report.ceiling_p50_us =
        kit::ceiling_time_us(measured.ceiling_begin_us.span(), measured.ceiling_end_us.span(), plan.ranks);
  }
  const double row_bytes = static_cast<double>(dispatch ? kit::dispatch_row_bytes(plan.params())
                                                        : kit::combine_row_bytes(plan.hidden));
  const double us = report.time.p50;
  const Rows wire = rows_of(measured.wire_rows.span(), plan.ranks);
  const Rows logical = rows_of(measured.logical_rows.span(), plan.ranks);
  const Rows moved = rows_of(measured.moved_rows.span(), plan.ranks);
  report.wire_gbps = gbps(wire.busiest * row_bytes, us);
  report.wire_gbps_mean = gbps(wire.mean * row_bytes, us);
  report.logical_gbps = gbps(logical.busiest * row_bytes, us);
  report.logical_gbps_mean = gbps(logical.mean * row_bytes, us);
  report.moved_gbps = gbps(moved.busiest * row_bytes, us);
  report.ceiling_gbps = gbps(moved.busiest * row_bytes, report.ceiling_p50_us);
  report.ceiling_fraction = report.ceiling_gbps > 0 ? report.moved_gbps / report.ceiling_gbps : 0;
  report.correct = true;
  add_verdicts(measured, report);
  if (plan.on_gpus()) add_stream_figures(plan, samples, report);
  return report;
}

const char* layout_name(epd_layout_t layout) {
  const char* const names[] = {"compact", "packed", "expert"};
  return names[layout];
}

const char* payload_name(epd_payload_t payload) {
  const char* const names[] = {"bf16", "fp8", "fp8-given", "opaque"};
  return names[payload];
}

const char* scales_name(epd_scale_format_t scales) {
  const char* const names[] = {"float32", "pow2", "ue8m0"};
  return names[scales];
}

void append_gpu(const Report& report, Json& json) {
  const StreamFigures& stream = report.stream;
  json["gpu"] = report.gpu;
  json["gpus"] = report.plan.gpus;
  json["wait"] = report.plan.wait_name();
  json["noop_ahead_us"] = summary_json(stream.noop_ahead);
  json["ahead_us"] = summary_json(stream.ahead);
  json["events_us"] = summary_json(stream.events);
  json["events_ahead_us"] = summary_json(stream.events_ahead);
  json["less_events_p50_us"] = stream.less_events_p50;
  json["less_events_p99_us"] = stream.less_events_p99;
  json["less_events_ahead_p50_us"] = stream.less_events_ahead_p50;
  if (!report.moves_rows()) return;
  json["net_p50_us"] = stream.net_p50;
  json["net_p99_us"] = stream.net_p99;
  json["net_ahead_p50_us"] = stream.net_ahead_p50;
  if (report.plan.overlap) {
    json["overlap"] = {
        {"operation_us", stream.overlap.operation},     {"gemm_us", stream.overlap.gemm},
        {"serial_us", stream.overlap.serial},           {"overlapped_us", stream.overlap.overlapped},
        {"gemm_beside_us", stream.overlap.gemm_beside}, {"efficiency", stream.overlap.efficiency()},
        {"gemm_slowdown", stream.overlap.slowdown()}};
  }
  json["net_ahead_p99_us"] = stream.net_ahead_p99;
  json["net_wire_gbps"] = stream.net_wire_gbps;
  json["host_us"] = summary_json(stream.host);
  json["call_us"] = summary_json(stream.call);
  if (report.operation == "dispatch") {
    json["counts_us"] = summary_json(stream.counts);
    json["counts_fraction"] = stream.counts_fraction;
  }
  const auto measured = [](double value) { return value > 0 ? Json(value) : Json(); };
  json["ceiling_push_gbps"] = measured(stream.ceiling.push);
  json["ceiling_pull_gbps"] = measured(stream.ceiling.pull);
  json["ceiling_copy_engine_gbps"] = measured(stream.ceiling.copy_engine);
  if (report.ceiling_gbps <= 0) json["ceiling_gbps"] = json["ceiling_fraction"] = Json();
}

}  // namespace

std::string verdict_of(const Report& report) {
  return report.correct && !report.moves_rows() ? "ok" : verdict_of(report.correct, report.checks);
}

// What rows the operation moves: combine's are bf16 whatever dispatch sent.
std::string rows_of(const Report& report) {
  RunPlan plan = report.plan;
  if (report.operation == "combine") plan.payload = EPD_PAYLOAD_BF16, plan.scales = EPD_SCALE_FORMAT_FLOAT32;
  return plan.mode() + (plan.cached && report.operation == "dispatch" ? " cached" : "");
}

std::vector<Report> make_reports(const RunPlan& plan, const Samples& samples) {
  std::vector<Report> reports;
  if (plan.does_dispatch()) reports.push_back(report_operation("dispatch", plan, samples));
  if (plan.does_combine()) reports.push_back(report_operation("combine", plan, samples));
  if (plan.operation == Operation::kNoop) {
    Report report;
    report.operation = "noop";
    report.plan = plan;
    report.daemon = samples.daemon.data();
    report.time = report.noop = kit::summarize(samples.noop_us.span());
    if (plan.on_gpus()) add_stream_figures(plan, samples, report);
    report.correct = true;  // every operation ended with OK; otherwise there would be no report
    reports.push_back(report);
  }
  return reports;
}

std::string to_json(const Report& report) {
  const RunPlan& plan = report.plan;
  Json json{{"op", report.operation},
            {"backend", plan.on_gpus() ? "cuda" : "host"},
            {"ranks", plan.ranks},
            {"tokens", plan.tokens},
            {"hidden", plan.hidden},
            {"topk", plan.topk},
            {"experts", plan.experts},
            {"payload", payload_name(plan.payload)},
            {"scales", scales_name(plan.scales)},
            {"scale_layout", plan.scale_layout == EPD_SCALE_LAYOUT_ROW_MAJOR ? "row_major" : "column_major"},
            {"layout", layout_name(plan.layout)},
            {"alignment", plan.alignment},
            {"max_recv_rows", plan.max_recv_rows},
            {"priority", plan.priority},
            {"sms", plan.sms},
            {"linger_us", plan.linger_us},
            {"depth", plan.depth},
            {"routing", plan.routing},
            {"seed", plan.seed},
            {"warm_cache", plan.warm_cache},
            {"iters", plan.iterations},
            {"samples", report.time.count},
            {"min_us", report.time.min},
            {"p50_us", report.time.p50},
            {"p90_us", report.time.p90},
            {"p99_us", report.time.p99},
            {"max_us", report.time.max}};
  const std::pair<const char*, double> speeds[] = {
      {"wire_gbps", report.wire_gbps},           {"wire_gbps_mean", report.wire_gbps_mean},
      {"logical_gbps", report.logical_gbps},     {"logical_gbps_mean", report.logical_gbps_mean},
      {"moved_gbps", report.moved_gbps},         {"ceiling_gbps", report.ceiling_gbps},
      {"ceiling_p50_us", report.ceiling_p50_us}, {"ceiling_fraction", report.ceiling_fraction}};
  for (const auto& [name, value] : speeds) json[name] = report.moves_rows() ? Json(value) : Json();
  if (plan.on_gpus()) append_gpu(report, json);
  json["noop_p50_us"] = report.noop.p50;
  json["noop_p99_us"] = report.noop.p99;
  json["cached"] = plan.cached;
  json["weighted"] = plan.weighted;
  json["biases"] = plan.biases;
  json["return_weights"] = plan.return_weights;
  json["checks"] = report.checks;
  json["checked_columns"] = report.checked_columns();
  json["correct"] = report.correct;
  append_difference(report, json);
  json["daemon"] = report.daemon;
  return json.dump();
}

std::string to_table(const std::vector<Report>& reports) {
  if (reports.empty()) return "";
  if (reports.front().plan.on_gpus()) return to_gpu_table(reports);
  const RunPlan& plan = reports.front().plan;
  std::string text =
      format("%u rank%s x %u tokens, H=%u E=%u K=%u, %s, routing %s, %u iterations; %s\n", plan.ranks,
             plan.ranks == 1 ? "" : "s", plan.tokens, plan.hidden, plan.experts, plan.topk,
             plan.mode().c_str(), plan.routing.c_str(), plan.iterations, reports.front().daemon.c_str());
  text += format("%-9s %10s %10s %10s %8s %8s %8s %8s %6s  %s\n", "op", "p50 us", "p90 us", "p99 us", "wire",
                 "logical", "moved", "ceiling", "share", "result");
  for (const Report& report : reports) {
    text += format("%-9s %10.1f %10.1f %10.1f ", report.operation.c_str(), report.time.p50, report.time.p90,
                   report.time.p99);
    if (report.moves_rows()) {
      text += format("%8.2f %8.2f %8.2f %8.2f %5.0f%%", report.wire_gbps, report.logical_gbps,
                     report.moved_gbps, report.ceiling_gbps, 100 * report.ceiling_fraction);
    } else {
      text += format("%8s %8s %8s %8s %6s", "-", "-", "-", "-", "-");
    }
    text += format("  %s\n", verdict_of(report).c_str());
  }
  text += format("GB/s of the busiest rank at p50. Hand-off (noop): p50 %.1f us, p99 %.1f us.\n",
                 reports.front().noop.p50, reports.front().noop.p99);
  append_differences(reports, text);
  return text;
}

std::string to_markdown(const std::vector<Report>& reports) {
  if (!reports.empty() && reports.front().plan.on_gpus()) return to_gpu_markdown(reports);
  std::string text =
      "| ranks | tokens | operation | p50 us | p99 us | wire GB/s | moved GB/s | ceiling GB/s | of ceiling | "
      "result |\n|---:|---:|---|---:|---:|---:|---:|---:|---:|---|\n";
  for (const Report& report : reports) {
    if (!report.moves_rows()) {
      text += format("| %u | - | noop | %.1f | %.1f | - | - | - | - | %s |\n", report.plan.ranks,
                     report.time.p50, report.time.p99, verdict_of(report).c_str());
      continue;
    }
    text += format("| %u | %u | %s %s | %.0f | %.0f | %.2f | %.2f | %.2f | %.0f %% | %s |\n",
                   report.plan.ranks, report.plan.tokens, report.operation.c_str(), rows_of(report).c_str(),
                   report.time.p50, report.time.p99, report.wire_gbps, report.moved_gbps, report.ceiling_gbps,
                   100 * report.ceiling_fraction, verdict_of(report).c_str());
  }
  append_differences(reports, text);
  return text;
}

std::string to_json(const LifecycleReport& report) {
  Json json{{"op", report.name},         {"backend", "host"},         {"samples", report.time.count},
            {"min_us", report.time.min}, {"p50_us", report.time.p50}, {"p90_us", report.time.p90},
            {"p99_us", report.time.p99}, {"max_us", report.time.max}, {"correct", report.correct},
            {"daemon", report.daemon}};
  if (!report.problem.empty()) json["problem"] = report.problem;
  return json.dump();
}

std::string to_table(const std::vector<LifecycleReport>& reports) {
  std::string text =
      format("%-10s %8s %10s %10s %10s %10s\n", "", "samples", "p50 ms", "p90 ms", "p99 ms", "max ms");
  for (const LifecycleReport& report : reports) {
    text += format("%-10s %8zu %10.3f %10.3f %10.3f %10.3f%s%s\n", report.name.c_str(), report.time.count,
                   report.time.p50 / 1e3, report.time.p90 / 1e3, report.time.p99 / 1e3, report.time.max / 1e3,
                   report.problem.empty() ? "" : "  ", report.problem.c_str());
  }
  return text;
}

}  // namespace epd::bench
