// The demo's table.
#pragma once

#include "plan.h"

#include <string>
#include <vector>

namespace epd::demo {

// Of an operation alone, one micro-batch: p50 of the slowest rank; GB/s (1e9 bytes) of the busiest rank.
struct OperationFigures {
  double p50_us = 0;
  double gbps = 0;
  double ceiling_gbps = 0;
  double fraction = 0;
};

struct LayerFigures {
  std::uint64_t rows = 0;  // moved in a step, all ranks, each way
  OperationFigures dispatch;
  OperationFigures combine;
  double hidden_share = 0;  // share of communication hidden behind computation: 1 - blocked / operation time
  double skew = 0;          // the busiest expert's selections over the mean
  std::uint32_t checks = 0;
  std::uint32_t failures = 0;
  std::string first_difference;
};

struct DemoReport {
  std::vector<LayerFigures> layers;
  double step_p50_us = 0;  // a forward pass, slowest rank, without the comparisons
  double hidden_share = 0;
  std::uint64_t rows = 0;  // of a step
  std::uint32_t checks = 0;
  std::uint32_t failures = 0;
  std::uint64_t checksum = 0;  // of the final hidden states of all passes and ranks
  std::uint32_t sum_ranks = 0;
  double link_bytes = 0;  // of a step, on the links between nodes, with their headers
  std::string daemon;

  bool correct() const { return failures == 0 && checks > 0; }
};

DemoReport make_report(const DemoPlan& plan, const DemoRecords& records);
std::string to_table(const DemoPlan& plan, const DemoReport& report);
std::string to_json(const DemoPlan& plan, const DemoReport& report);

}  // namespace epd::demo
