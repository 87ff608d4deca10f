// From samples to figures, and figures to text.
#pragma once

#include "kit/statistics.h"
#include "plan.h"
#include "samples.h"

#include <string>
#include <vector>

namespace epd::bench {

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
  std::string first_difference;

  bool moves_rows() const { return operation != "noop"; }
};

// Of a run that has ended; one report per operation.
std::vector<Report> make_reports(const RunPlan& plan, const Samples& samples);

std::string to_json(const Report& report);  // one line
std::string to_table(const std::vector<Report>& reports);
std::string to_markdown(const std::vector<Report>& reports);  // the table of the README

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
