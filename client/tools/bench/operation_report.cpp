#include "operation_report.h"

#include "kit/ceiling.h"

#include <algorithm>
#include <span>

namespace epd::bench {
namespace {

using kit::add_times;
using kit::add_verdicts;
using kit::column;
using kit::Column;
using kit::differences_of;
using kit::format;
using kit::number;
using kit::Style;
using kit::summary_json;
using kit::table;
using kit::verdict_of;

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

// A figure that is not measured is null.
Json if_positive(double value) {
  return value > 0 ? Json(value) : Json();
}
Json ratio(double part, double whole) {
  return whole > 0 ? Json(part / whole) : Json();
}

kit::Summary slowest(const kit::SharedArray<double>& samples, const RunPlan& plan) {
  return kit::summarize(kit::slowest_rank(samples.span(), plan.ranks));
}

bool is_of_gpus(const Json& report) {
  return report.at("backend") == "cuda";
}
bool moves_rows(const Json& report) {
  return report.at("op") != "noop";
}

Json base_report(const char* operation, const RunPlan& plan, const kit::Summary& time) {
  // Combine's rows are bf16 whatever dispatch sent.
  RunPlan rows = plan;
  if (std::string(operation) == "combine")
    rows.payload = EPD_PAYLOAD_BF16, rows.scales = EPD_SCALE_FORMAT_FLOAT32;
  const bool cached = plan.cached && std::string(operation) == "dispatch";
  Json report{{"op", operation},
              {"rows", std::string(operation) == "noop" ? "" : rows.mode() + (cached ? " cached" : "")},
              {"backend", plan.on_gpus() ? "cuda" : "host"},
              {"ranks", plan.ranks},
              {"tokens", plan.tokens},
              {"hidden", plan.hidden},
              {"topk", plan.topk},
              {"experts", plan.experts},
              {"payload", word_of(kPayloads, plan.payload)},
              {"scales", word_of(kScales, plan.scales)},
              {"scale_layout", word_of(kScaleLayouts, plan.scale_layout)},
              {"layout", word_of(kLayouts, plan.layout)},
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
              {"cached", plan.cached},
              {"weighted", plan.weighted},
              {"biases", plan.biases},
              {"return_weights", plan.return_weights}};
  add_times(report, time);
  return report;
}

// GB/s (1e9 bytes/s): bytes of the busiest rank over the p50 time; `mean`: the ranks' mean.
void add_speeds(Json& report, const RunPlan& plan, const OperationSamples& measured) {
  const bool dispatch = report.at("op") == "dispatch";
  const double row_bytes = static_cast<double>(dispatch ? kit::dispatch_row_bytes(plan.params())
                                                        : kit::combine_row_bytes(plan.hidden));
  const auto gbps = [&](double rows, double us) { return us > 0 ? rows * row_bytes / us * 1e-3 : 0; };
  const double us = report.at("p50_us");
  const Rows wire = rows_of(measured.wire_rows.span(), plan.ranks);
  const Rows logical = rows_of(measured.logical_rows.span(), plan.ranks);
  const Rows moved = rows_of(measured.moved_rows.span(), plan.ranks);
  const double ceiling_us = plan.on_gpus() ? 0
                                           : kit::ceiling_time_us(measured.ceiling_begin_us.span(),
                                                                  measured.ceiling_end_us.span(), plan.ranks);
  const double ceiling = gbps(moved.busiest, ceiling_us);
  report.update({{"wire_gbps", gbps(wire.busiest, us)},
                 {"wire_gbps_mean", gbps(wire.mean, us)},
                 {"logical_gbps", gbps(logical.busiest, us)},
                 {"logical_gbps_mean", gbps(logical.mean, us)},
                 {"moved_gbps", gbps(moved.busiest, us)},
                 {"ceiling_gbps", if_positive(ceiling)},
                 {"ceiling_p50_us", ceiling_us},
                 {"ceiling_fraction", ratio(gbps(moved.busiest, us), ceiling)}});
}

// Times in the stream. less_events: less that of an empty pair of events that was timed alike.
void add_stream(Json& report, const RunPlan& plan, const Samples& samples, const kit::Summary& ahead) {
  const kit::Summary events = kit::summarize(samples.events_us.span());
  const kit::Summary events_ahead = kit::summarize(samples.events_ahead_us.span());
  report.update({{"gpu", samples.gpu.data()},
                 {"gpus", plan.gpus},
                 {"wait", plan.wait_name()},
                 {"in_stream", plan.in_stream},
                 {"noop_ahead_us", summary_json(kit::summarize(samples.noop_ahead_us.span()))},
                 {"ahead_us", summary_json(ahead)},
                 {"events_us", summary_json(events)},
                 {"events_ahead_us", summary_json(events_ahead)},
                 {"less_events_p50_us", report.at("p50_us").get<double>() - events.p50},
                 {"less_events_p99_us", report.at("p99_us").get<double>() - events.p50},
                 {"less_events_ahead_p50_us", ahead.p50 - events_ahead.p50}});
}

// Adds the rates on GPUs. "net" figures leave out the p50 of the no-op that was timed alike.
void add_net(Json& report, const RunPlan& plan, const Samples& samples, const OperationSamples& measured,
             const GpuCeiling& ceiling) {
  const bool dispatch = report.at("op") == "dispatch";
  const kit::Summary noop = kit::summarize(samples.noop_us.span());
  const double noop_ahead = kit::summarize(samples.noop_ahead_us.span()).p50;
  const kit::Summary ahead = slowest(measured.ahead_us, plan);
  const double p50 = report.at("p50_us");
  const double net = p50 - noop.p50;
  const double net_wire = net > 0 ? report.at("wire_gbps").get<double>() * p50 / net : 0;
  const double best = dispatch ? ceiling.push : ceiling.pull;
  report.update({{"net_p50_us", net},
                 {"net_p99_us", report.at("p99_us").get<double>() - noop.p50},
                 {"net_ahead_p50_us", ahead.p50 - noop_ahead},
                 {"net_ahead_p99_us", ahead.p99 - noop_ahead},
                 {"net_wire_gbps", net_wire},
                 {"host_us", summary_json(slowest(measured.host_us, plan))},
                 {"call_us", summary_json(kit::summarize(measured.call_us.span()))},
                 {"ceiling_gbps", if_positive(best)},
                 {"ceiling_fraction", ratio(net_wire, best)},
                 {"ceiling_push_gbps", if_positive(ceiling.push)},
                 {"ceiling_pull_gbps", if_positive(ceiling.pull)},
                 {"ceiling_copy_engine_gbps", if_positive(ceiling.copy_engine)}});
  if (!ceiling.why_not.empty()) report["no_ceiling"] = ceiling.why_not;
  if (dispatch) {
    std::vector<double> fractions;
    for (std::size_t i = 0; i < measured.host_us.size(); ++i)
      fractions.push_back(measured.counts_us[i] / std::max(measured.host_us[i], 1e-3));
    report["counts_us"] = summary_json(slowest(measured.counts_us, plan));
    report["counts_fraction"] = kit::quantile(fractions, 0.5);
  }
  if (!plan.overlap) return;
  const OverlapTimes times{ahead.p50, slowest(measured.gemm_us, plan).p50,
                           slowest(measured.serial_us, plan).p50, slowest(measured.overlapped_us, plan).p50,
                           slowest(measured.gemm_beside_us, plan).p50};
  report["overlap"] = {{"operation_us", times.operation},     {"gemm_us", times.gemm},
                       {"serial_us", times.serial},           {"overlapped_us", times.overlapped},
                       {"gemm_beside_us", times.gemm_beside}, {"efficiency", times.efficiency()},
                       {"gemm_slowdown", times.slowdown()}};
}

Json make_report(const char* operation, const RunPlan& plan, const Samples& samples,
                 const GpuCeiling& ceiling) {
  const bool noop = std::string(operation) == "noop";
  const OperationSamples& measured =
      std::string(operation) == "dispatch" ? samples.dispatch : samples.combine;
  const kit::Summary noops = kit::summarize(samples.noop_us.span());
  Json report = base_report(operation, plan, noop ? noops : slowest(measured.time_us, plan));
  if (noop) {
    for (const char* speed : {"wire_gbps", "logical_gbps", "moved_gbps", "ceiling_gbps", "ceiling_fraction"})
      report[speed] = nullptr;
  } else {
    add_speeds(report, plan, measured);
  }
  if (plan.on_gpus())
    add_stream(report, plan, samples,
               noop ? kit::summarize(samples.noop_ahead_us.span()) : slowest(measured.ahead_us, plan));
  if (plan.on_gpus() && !noop) add_net(report, plan, samples, measured, ceiling);
  report["noop_p50_us"] = noops.p50;
  report["noop_p99_us"] = noops.p99;
  if (noop) {
    report["correct"] = true;  // every operation ended with OK; otherwise there would be no report
  } else {
    report["checked_columns"] =
        std::string(operation) == "dispatch" ? plan.checked_columns(0).count : plan.hidden;
    add_verdicts(report, measured.verdicts.span());
  }
  report["daemon"] = samples.daemon.data();
  return report;
}

std::string counted(std::uint32_t count, const char* noun) {
  return format("%u %s%s", count, noun, count == 1 ? "" : "s");
}

std::string text_field(const Json& report, const char* field) {
  return report.at(field).get<std::string>();
}

// The text about the conditions that all reports have in common.
std::string conditions(const Json& report) {
  std::string text = format("H=%u E=%u K=%u, %u iterations, routing fresh in each, %s; %s.\n",
                            report.at("hidden").get<unsigned>(), report.at("experts").get<unsigned>(),
                            report.at("topk").get<unsigned>(), report.at("iters").get<unsigned>(),
                            report.at("warm_cache") ? "caches not flushed" : "caches flushed",
                            text_field(report, "daemon").c_str());
  if (!is_of_gpus(report))
    return text + format("GB/s of the busiest rank at p50. Hand-off (noop): p50 %.1f us, p99 %.1f us.\n",
                         report.at("noop_p50_us").get<double>(), report.at("noop_p99_us").get<double>());
  return text_field(report, "gpu") + "; " + text;
}

std::string noop_line(const Json& report) {
  const auto times = [](const Json& p50, const Json& p99) {
    return format("p50 %.1f us, p99 %.1f us", p50.get<double>(), p99.get<double>());
  };
  const auto summary = [&](const char* field) {
    return times(report.at(field).at("p50"), report.at(field).at("p99"));
  };
  const std::string text = "Empty operation (noop), wait by " + text_field(report, "wait") + ": " +
                           times(report.at("noop_p50_us"), report.at("noop_p99_us"));
  if (!report.at("in_stream")) return text + ".\n";
  return text + "; ahead " + summary("noop_ahead_us") + ".\nEmpty pair of events: " + summary("events_us") +
         "; ahead " + summary("events_ahead_us") + ".\n";
}

constexpr const char* kLegend =
    "Client-stream time, slowest rank, us. wait: how the stream waits (memop, kernel); no stream: submitted "
    "without\n"
    "one, the CPU's time until it saw the end. less events: less the p50 of an empty pair of events; net: "
    "less\n"
    "that of an empty operation (same wait); ahead: submitted before, behind a start barrier at which the "
    "streams\n"
    "of all ranks go on together (in a graph: both events and the start barrier are in it).\n"
    "GB/s of the busiest rank at net p50; ceiling: plain copies of the same bytes on the same GPUs before "
    "the run\n"
    "(dispatch: bulk stores, combine: bulk loads). call: epd_dispatch or epd_combine on the CPU; counts:\n"
    "epd_ticket_counts returned, and its share of the time until the CPU saw the end (host). (n): results "
    "compared\n"
    "with the reference, one for each rank and iteration that was checked.\n";

std::string legend(const Json& report) {
  std::string text = kLegend;
  const std::uint32_t gpus = report.at("gpus");
  const std::uint32_t ranks = report.at("ranks");
  if (gpus < ranks) text += format("%u ranks share %s in turn.\n", ranks, counted(gpus, "GPU").c_str());
  if (report.contains("no_ceiling")) text += "No ceiling: " + text_field(report, "no_ceiling") + ".\n";
  if (report.contains("ceiling_push_gbps") && !report.at("ceiling_push_gbps").is_null())
    text += format("Plain copies, %u GPUs at once, GB/s: push %.0f, pull %.0f, copy engine %.0f.\n", ranks,
                   report.at("ceiling_push_gbps").get<double>(), report.at("ceiling_pull_gbps").get<double>(),
                   report.at("ceiling_copy_engine_gbps").get<double>());
  return text;
}

std::string operation_of(const Json& report) {
  if (!moves_rows(report)) return "noop";
  const std::string routing = text_field(report, "routing");
  return text_field(report, "op") + " " + text_field(report, "rows") +
         (routing == "uniform" ? "" : ", " + routing);
}

Column tokens() {
  return {"tokens", [](const Json& r) { return moves_rows(r) ? number(r.at("tokens"), "%.0f") : ""; }};
}
Column share() {
  return {"share", [](const Json& r) {
            const Json share = r.value("ceiling_fraction", Json());
            return share.is_null() ? "" : format("%.0f %%", 100 * share.get<double>());
          }};
}

std::vector<Column> host_columns() {
  return {column("ranks", "ranks"),
          tokens(),
          {"operation", operation_of},
          column("p50 us", "p50_us", "%.1f"),
          column("p90 us", "p90_us", "%.1f"),
          column("p99 us", "p99_us", "%.1f"),
          column("wire", "wire_gbps", "%.2f"),
          column("logical", "logical_gbps", "%.2f"),
          column("moved", "moved_gbps", "%.2f"),
          column("ceiling", "ceiling_gbps", "%.2f"),
          share(),
          {"result", verdict_of}};
}

// Two figures of a report, the second maybe in a summary; "" where there is no stream.
Column in_stream(const char* title, const char* first, const char* second) {
  const auto value = [](const Json& report, const std::string& path) {
    return report.value(Json::json_pointer(path), Json());
  };
  return {title, [=](const Json& report) {
            const Json one = value(report, first);
            if (!report.at("in_stream") || one.is_null()) return std::string();
            return number(one, "%.1f") + " / " + number(value(report, second), "%.1f");
          }};
}

std::vector<Column> gpu_columns() {
  const auto net = [](const Json& r) {
    return moves_rows(r) ? number(r.at("net_p50_us"), "%.1f") + " / " + number(r.at("net_p99_us"), "%.1f")
                         : "";
  };
  const auto ahead = [](const Json& r) {
    return in_stream("", moves_rows(r) ? "/net_ahead_p50_us" : "/noop_ahead_us/p50",
                     moves_rows(r) ? "/net_ahead_p99_us" : "/noop_ahead_us/p99")
        .cell(r);
  };
  const auto counts = [](const Json& r) {
    const double p50 = r.value(Json::json_pointer("/counts_us/p50"), 0.0);
    return p50 > 0 ? format("%.0f (%.0f %%)", p50, 100 * r.at("counts_fraction").get<double>()) : "";
  };
  const auto p50_of = [](const char* field, const char* pattern) {
    return [=](const Json& r) { return r.contains(field) ? number(r.at(field).at("p50"), pattern) : ""; };
  };
  return {
      column("ranks", "ranks"),
      tokens(),
      column("SMs", "sms"),
      {"operation", operation_of},
      column("wait", "wait"),
      {"p50 / p99",
       [](const Json& r) { return number(r.at("p50_us"), "%.1f") + " / " + number(r.at("p99_us"), "%.1f"); }},
      in_stream("less events, idle / ahead", "/less_events_p50_us", "/less_events_ahead_p50_us"),
      {"net", net},
      {"net, ahead", ahead},
      column("wire GB/s", "net_wire_gbps"),
      column("ceiling", "ceiling_gbps"),
      share(),
      {"host p50", p50_of("host_us", "%.0f")},
      {"call", p50_of("call_us", "%.1f")},
      {"counts", counts},
      {"result", verdict_of}};
}

// Operations beside a GEMM, in us.
std::string overlap_table(const Reports& reports, Style style) {
  Reports overlaps;
  for (const Json& report : reports) {
    if (!report.contains("overlap")) continue;
    overlaps.push_back(report.at("overlap"));
    overlaps.back()["operation"] = operation_of(report);
  }
  if (overlaps.empty()) return "";
  const auto hidden = [](const Json& r) { return format("%.0f %%", 100 * r.at("efficiency").get<double>()); };
  return "\n" + table(overlaps,
                      {column("operation", "operation"),
                       column("alone", "operation_us", "%.1f"),
                       column("GEMM alone", "gemm_us", "%.1f"),
                       column("one after the other", "serial_us", "%.1f"),
                       column("beside each other", "overlapped_us", "%.1f"),
                       {"hidden", hidden},
                       column("GEMM beside it", "gemm_beside_us", "%.1f"),
                       column("slowdown", "gemm_slowdown", "%.3f")},
                      style);
}

}  // namespace

Reports make_reports(const RunPlan& plan, const Samples& samples, const GpuCeiling& ceiling) {
  Reports reports;
  if (plan.does_dispatch()) reports.push_back(make_report("dispatch", plan, samples, ceiling));
  if (plan.does_combine()) reports.push_back(make_report("combine", plan, samples, ceiling));
  if (plan.operation == Operation::kNoop) reports.push_back(make_report("noop", plan, samples, ceiling));
  return reports;
}

std::string to_text(const Reports& reports, kit::Style style) {
  if (reports.empty()) return "";
  const auto moving = std::find_if(reports.begin(), reports.end(), moves_rows);
  const Json& first = moving != reports.end() ? *moving : reports.front();
  const bool gpus = is_of_gpus(first);
  const std::string notes = gpus ? noop_line(reports.front()) + legend(first) : "";
  return conditions(first) + notes + differences_of(reports) + "\n" +
         table(reports, gpus ? gpu_columns() : host_columns(), style) + overlap_table(reports, style);
}

}  // namespace epd::bench
