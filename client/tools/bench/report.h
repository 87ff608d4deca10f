// From samples to figures, and figures to text.
#pragma once

#include "gpu_ceiling.h"
#include "kit/statistics.h"
#include "overlap.h"
#include "plan.h"
#include "samples.h"

#include <string>
#include <vector>

namespace epd::bench {

// Of an operation on GPUs, beside what every operation has. Times in us; net: less the p50 of the no-op that
// was timed alike; less_events: less that of an empty pair of events that was.
struct StreamFigures {
  kit::Summary events, events_ahead;
  double less_events_p50 = 0, less_events_p99 = 0, less_events_ahead_p50 = 0;
  double net_p50 = 0, net_p99 = 0;
  kit::Summary ahead;  // in the stream, submitted before the stream came to it
  kit::Summary noop_ahead;
  double net_ahead_p50 = 0, net_ahead_p99 = 0;
  kit::Summary host;           // from submission to completion as the CPU sees it
  kit::Summary call;           // the submission itself, all ranks
  kit::Summary counts;         // dispatch: from submission to epd_ticket_counts
  double counts_fraction = 0;  // p50 of counts / host
  double net_wire_gbps = 0;    // wire bytes over net_p50
  GpuCeiling ceiling;
  OverlapTimes overlap;  // medians; all 0 unless measured
};

// One operation of one run.
struct Report {
  std::string operation;  // "dispatch", "combine", "noop"
  RunPlan plan;
  std::string daemon;
  kit::Summary time;  // us
  kit::Summary noop;  // us
  // GB/s (1e9 bytes/s): bytes of the busiest rank over the p50 time; `mean`: the ranks' mean.
  double wire_gbps = 0, wire_gbps_mean = 0;
  double logical_gbps = 0, logical_gbps_mean = 0;
  double moved_gbps = 0, ceiling_gbps = 0, ceiling_fraction = 0;
  double ceiling_p50_us = 0;
  std::uint32_t checks = 0;  // results compared with the reference, all ranks
  bool correct = false;      // none of them differed
  StreamFigures stream;      // of GPUs
  std::string gpu;
  std::string first_difference;

  // Values of each row that checks compared.
  std::uint32_t checked_columns() const {
    return operation == "dispatch" ? plan.checked_columns(0).count : plan.hidden;
  }
  bool moves_rows() const { return operation != "noop"; }
};

// Of a run that has ended; one report per operation.
std::vector<Report> make_reports(const RunPlan& plan, const Samples& samples);

std::string to_json(const Report& report);  // one line
std::string to_table(const std::vector<Report>& reports);
std::string to_markdown(const std::vector<Report>& reports);  // a table as in kernels/PERFORMANCE.md

// The parts of the above that are about GPUs.
void add_stream_figures(const RunPlan& plan, const Samples& samples, Report& report);
void add_ceiling(const GpuCeiling& ceiling, Report& report);
std::string to_gpu_table(const std::vector<Report>& reports);
std::string to_gpu_markdown(const std::vector<Report>& reports);
// "WRONG", "bit-exact", "unchecked", "ok"; "packed bf16"
std::string verdict_of(const Report& report);
std::string rows_of(const Report& report);

// Of `epbench attach` and `epbench reap`.
struct LifecycleReport {
  std::string name;  // "attach", "detach", "rank_lost"
  std::string daemon;
  kit::Summary time;  // us
  bool correct = true;
  std::string problem;
};
std::string to_json(const LifecycleReport& report);
std::string to_table(const std::vector<LifecycleReport>& reports);

}  // namespace epd::bench
