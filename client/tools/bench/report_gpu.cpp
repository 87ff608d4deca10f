// Figures of operations on GPUs, and their tables.
#include "report.h"

#include "kit/ceiling.h"
#include "report_parts.h"

#include <algorithm>

namespace epd::bench {
namespace {

std::vector<double> slowest(const kit::SharedArray<double>& samples, std::uint32_t ranks) {
  return kit::slowest_rank(samples.span(), ranks);
}

std::string operation_of(const Report& report) {
  return report.moves_rows() ? report.operation + " " + rows_of(report) : report.operation;
}

std::string routing_of(const Report& report) {
  return report.plan.routing == "uniform" ? "" : ", " + report.plan.routing;
}

std::string speed_of(double gbps) {
  return gbps > 0 ? format("%.0f", gbps) : "n/a";
}

std::string share_of(double part, double whole) {
  return whole > 0 ? format("%.0f %%", 100 * part / whole) : "n/a";
}

// How many results were compared, and, if not of all columns, of how many.
std::string checks_of(const Report& report) {
  if (report.checks == 0) return verdict_of(report);
  const std::uint32_t columns = report.checked_columns();
  const std::string part = columns == report.plan.hidden ? "" : format(", %u columns", columns);
  return verdict_of(report) + format(" (%u%s)", report.checks, part.c_str());
}

std::string conditions(const Report& report) {
  const RunPlan& plan = report.plan;
  std::string text = format("%s; H=%u E=%u K=%u, %u iterations, routing fresh in each, %s; %s.\n",
                            report.gpu.c_str(), plan.hidden, plan.experts, plan.topk, plan.iterations,
                            plan.warm_cache ? "caches not flushed" : "L2 flushed", report.daemon.c_str());
  return text;
}

std::string legend(const Report& report) {
  std::string text =
      "Client-stream time, slowest rank, us. wait: how the stream waits (memop, kernel); no stream: "
      "submitted "
      "without\none, the CPU's time until it saw the end. less events: less the p50 of an empty pair of "
      "events; "
      "net: less\nthat of an empty operation (same wait); ahead: submitted before, behind a start barrier at "
      "which the streams\nof all ranks go on together (in a graph: both events and the start barrier are in "
      "it)."
      "\nGB/s of the busiest rank at net p50; ceiling: plain copies of the same bytes on the same GPUs "
      "before "
      "the run\n(dispatch: bulk stores, combine: bulk loads). call: epd_dispatch or epd_combine on the CPU; "
      "counts: epd_ticket_counts returned,\nand its share of the time until the CPU saw the end (host). (n): "
      "results compared "
      "with the reference, one for each rank and\niteration that was checked.\n";
  if (report.plan.gpus < report.plan.ranks)
    text += format("%u ranks share %u %s in turn.\n", report.plan.ranks, report.plan.gpus,
                   report.plan.gpus == 1 ? "GPU" : "GPUs");
  const GpuCeiling& ceiling = report.stream.ceiling;
  if (ceiling.push > 0) {
    text += format("Plain copies, %u GPUs at once, GB/s: push %.0f, pull %.0f, copy engine %.0f.\n",
                   report.plan.ranks, ceiling.push, ceiling.pull, ceiling.copy_engine);
  } else if (!ceiling.why_not.empty()) {
    text += "No ceiling: " + ceiling.why_not + ".\n";
  }
  return text;
}

std::string noop_line(const Report& report) {
  const StreamFigures& stream = report.stream;
  std::string text = format("Empty operation (noop), wait by %s: p50 %.1f us, p99 %.1f us",
                            report.plan.wait_name().c_str(), report.noop.p50, report.noop.p99);
  if (!report.plan.in_stream) return text + ".\n";
  text += format("; ahead p50 %.1f us, p99 %.1f us.\n", stream.noop_ahead.p50, stream.noop_ahead.p99);
  return text + format("Empty pair of events: p50 %.1f us, p99 %.1f us; ahead p50 %.1f us, p99 %.1f us.\n",
                       stream.events.p50, stream.events.p99, stream.events_ahead.p50,
                       stream.events_ahead.p99);
}

std::string overlap_line(const Report& report) {
  const OverlapTimes& times = report.stream.overlap;
  return format(
      "%-24s alone %.1f, GEMM alone %.1f, one after the other %.1f, beside each other %.1f: %.0f %% of the "
      "operation hidden, GEMM beside it %.1f (%.3f x)\n",
      "", times.operation, times.gemm, times.serial, times.overlapped, 100 * times.efficiency(),
      times.gemm_beside, times.slowdown());
}

void subtract_events(const Samples& samples, Report& report) {
  StreamFigures& stream = report.stream;
  stream.events = kit::summarize(samples.events_us.span());
  stream.events_ahead = kit::summarize(samples.events_ahead_us.span());
  stream.less_events_p50 = report.time.p50 - stream.events.p50;
  stream.less_events_p99 = report.time.p99 - stream.events.p50;
  stream.less_events_ahead_p50 = stream.ahead.p50 - stream.events_ahead.p50;
}

// Two figures that there are in streams alone.
std::string of_stream(const RunPlan& plan, double first, double second) {
  return plan.in_stream ? format("%.1f / %.1f", first, second) : "-";
}

std::string markdown_line(const Report& report) {
  const RunPlan& plan = report.plan;
  const StreamFigures& stream = report.stream;
  if (!report.moves_rows()) {
    return format("| %u | - | - | noop | %s | %.1f / %.1f | %s | - | %s | - | - | - | - | - | - | %s |\n",
                  plan.ranks, plan.wait_name().c_str(), report.time.p50, report.time.p99,
                  of_stream(plan, stream.less_events_p50, stream.less_events_ahead_p50).c_str(),
                  of_stream(plan, stream.noop_ahead.p50, stream.noop_ahead.p99).c_str(),
                  checks_of(report).c_str());
  }
  const std::string counts =
      stream.counts.p50 > 0 ? format("%.0f (%.0f %%)", stream.counts.p50, 100 * stream.counts_fraction) : "-";
  return format(
      "| %u | %u | %u | %s%s | %s | %.1f / %.1f | %s | %.1f / %.1f | %s | %.0f | %s | %s | "
      "%.0f | %.1f | "
      "%s | "
      "%s |\n",
      plan.ranks, plan.tokens, plan.sms, operation_of(report).c_str(), routing_of(report).c_str(),
      plan.wait_name().c_str(), report.time.p50, report.time.p99,
      of_stream(plan, stream.less_events_p50, stream.less_events_ahead_p50).c_str(), stream.net_p50,
      stream.net_p99, of_stream(plan, stream.net_ahead_p50, stream.net_ahead_p99).c_str(),
      stream.net_wire_gbps, speed_of(report.ceiling_gbps).c_str(),
      share_of(stream.net_wire_gbps, report.ceiling_gbps).c_str(), stream.host.p50, stream.call.p50,
      counts.c_str(), checks_of(report).c_str());
}

}  // namespace

void add_stream_figures(const RunPlan& plan, const Samples& samples, Report& report) {
  StreamFigures& stream = report.stream;
  report.gpu = samples.gpu.data();
  stream.noop_ahead = kit::summarize(samples.noop_ahead_us.span());
  if (!report.moves_rows()) {
    stream.ahead = stream.noop_ahead;
    subtract_events(samples, report);
    return;
  }
  const OperationSamples& measured = report.operation == "dispatch" ? samples.dispatch : samples.combine;
  stream.ahead = kit::summarize(slowest(measured.ahead_us, plan.ranks));
  subtract_events(samples, report);
  if (plan.overlap) {
    const auto typical = [&](const auto& times) { return kit::summarize(slowest(times, plan.ranks)).p50; };
    stream.overlap = {stream.ahead.p50, typical(measured.gemm_us), typical(measured.serial_us),
                      typical(measured.overlapped_us), typical(measured.gemm_beside_us)};
  }
  stream.host = kit::summarize(slowest(measured.host_us, plan.ranks));
  stream.call = kit::summarize(measured.call_us.span());
  stream.net_p50 = report.time.p50 - report.noop.p50;
  stream.net_p99 = report.time.p99 - report.noop.p50;
  stream.net_ahead_p50 = stream.ahead.p50 - stream.noop_ahead.p50;
  stream.net_ahead_p99 = stream.ahead.p99 - stream.noop_ahead.p50;
  if (stream.net_p50 > 0) stream.net_wire_gbps = report.wire_gbps * report.time.p50 / stream.net_p50;
  if (report.operation != "dispatch") return;
  stream.counts = kit::summarize(slowest(measured.counts_us, plan.ranks));
  std::vector<double> fractions;
  for (std::size_t i = 0; i < measured.host_us.size(); ++i)
    fractions.push_back(measured.counts_us[i] / std::max(measured.host_us[i], 1e-3));
  stream.counts_fraction = kit::quantile(fractions, 0.5);
}

void add_ceiling(const GpuCeiling& ceiling, Report& report) {
  report.stream.ceiling = ceiling;
  if (!report.moves_rows()) return;
  report.ceiling_gbps = report.operation == "dispatch" ? ceiling.push : ceiling.pull;
  report.ceiling_fraction = report.ceiling_gbps > 0 ? report.stream.net_wire_gbps / report.ceiling_gbps : 0;
}

std::string to_gpu_table(const std::vector<Report>& reports) {
  const RunPlan& plan = reports.front().plan;
  std::string text = format("%u rank%s x %u tokens, %u SMs, routing %s, wait by %s; ", plan.ranks,
                            plan.ranks == 1 ? "" : "s", plan.tokens, plan.sms, plan.routing.c_str(),
                            plan.wait_name().c_str()) +
                     conditions(reports.front());
  for (const Report& report : reports) {
    const StreamFigures& stream = report.stream;
    text += format("%-24s p50 %8.1f  p90 %8.1f  p99 %8.1f", operation_of(report).c_str(), report.time.p50,
                   report.time.p90, report.time.p99);
    if (plan.in_stream) text += format("  less events %8.1f", stream.less_events_p50);
    if (!report.moves_rows()) {
      if (plan.in_stream) text += format("  ahead %8.1f", stream.less_events_ahead_p50);
      text += "  " + verdict_of(report) + "\n";
      continue;
    }
    text += format("  net p50 %8.1f  p99 %8.1f", stream.net_p50, stream.net_p99);
    if (plan.in_stream) {
      text += format("  ahead: p50 %8.1f  less events %8.1f  net %8.1f", stream.ahead.p50,
                     stream.less_events_ahead_p50, stream.net_ahead_p50);
    }
    text += "\n";
    text += format("%-24s wire %.2f GB/s (gross %.2f), ceiling %s (copy engine %s), share %s; %s\n", "",
                   stream.net_wire_gbps, report.wire_gbps, speed_of(report.ceiling_gbps).c_str(),
                   speed_of(stream.ceiling.copy_engine).c_str(),
                   share_of(stream.net_wire_gbps, report.ceiling_gbps).c_str(), checks_of(report).c_str());
    text += format("%-24s CPU: call p50 %.1f  p99 %.1f, end seen p50 %.1f  p99 %.1f", "", stream.call.p50,
                   stream.call.p99, stream.host.p50, stream.host.p99);
    if (stream.counts.p50 > 0)
      text += format(", counts p50 %.1f (%.0f %%)", stream.counts.p50, 100 * stream.counts_fraction);
    text += "\n";
    if (plan.overlap) text += overlap_line(report);
  }
  text += noop_line(reports.front()) + legend(reports.front());
  append_differences(reports, text);
  return text;
}

std::string to_gpu_markdown(const std::vector<Report>& reports) {
  const auto moving =
      std::find_if(reports.begin(), reports.end(), [](const Report& r) { return r.moves_rows(); });
  const Report& first = moving != reports.end() ? *moving : reports.front();
  std::string text = conditions(first) + noop_line(reports.front()) + legend(first);
  append_differences(reports, text);
  text +=
      "\n| ranks | tokens | SMs | operation | wait | p50 / p99 | less events, idle / ahead | net | net, "
      "ahead | wire GB/s | ceiling | "
      "share | "
      "host p50 | call "
      "| counts | result |\n|---:|---:|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|\n";
  for (const Report& report : reports) text += markdown_line(report);
  return text;
}

}  // namespace epd::bench
