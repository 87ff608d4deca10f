// epbench layer: what a whole layer takes, with operations and without, beside the daemon and without it.
#pragma once

#include "kit/statistics.h"
#include "plan.h"

#include <string>

namespace epd::bench {

// The times are of one layer (a graph's time over its number of layers), of the slowest rank of each
// iteration, in us.
struct LayerReport {
  RunPlan plan;
  std::string gpu;
  std::string gemm;  // what multiplied: "cuBLAS 13.0.2"
  std::string daemon;
  kit::Summary layer;      // with operations
  kit::Summary computing;  // the same graph without operations, beside the daemon
  kit::Summary moving;     // nothing but operations
  kit::Summary alone;      // without operations, without the daemon: before it and after it
  std::uint32_t checks = 0;
  bool correct = false;
  std::string first_difference;

  double over_alone() const { return alone.p50 > 0 ? layer.p50 / alone.p50 : 0; }
  // What the layer costs beyond computing, over the operations' own time.
  double added_over_moving() const { return moving.p50 > 0 ? (layer.p50 - alone.p50) / moving.p50 : 0; }
};

// Starts a daemon of its own, and measures before it, beside it and after it. Throws kit::ToolError. This
// process must have one thread.
LayerReport measure_layer(const RunPlan& plan, const std::string& program);

// Throws kit::ToolError naming the bad value and what is allowed.
void validate_layer(const RunPlan& plan);

std::string to_json(const LayerReport& report);
std::string to_table(const std::vector<LayerReport>& reports);

}  // namespace epd::bench
