// epbench nodes: operations of a group that spans nodes, and raw UCX on the same links, in turn.
#pragma once

#include "kit/report.h"
#include "plan.h"
#include "samples.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::bench {

inline constexpr std::uint32_t kMaxPairs = 1000;
inline constexpr std::uint32_t kMaxPairIterations = 100'000;

struct NodesPlan {
  RunPlan run;  // its ranks and tokens follow from the rest
  std::uint32_t ranks_per_node = 2;
  std::string rate;                                 // of each node's link: "4gbit"; empty: as fast as it goes
  std::string check;                                // network.check; empty: the daemon's default
  std::vector<std::uint32_t> tokens{4096, 128, 1};  // a run each
  std::uint32_t pairs = 5;                          // of a measurement of ours and one of raw UCX
  std::uint32_t pair_iterations = 0;                // of ours; 0: 3 from 1024 tokens on, else 20

  // Throws kit::ToolError naming the bad value and what is allowed.
  void validate() const;
  RunPlan run_of(std::uint32_t with_tokens) const;
};

// Daemons on nodes of their own. Returns the reports of all runs. This process must have one thread.
Reports measure_nodes(const NodesPlan& plan, const std::string& program);

// Of one iteration: the largest sum of the ranks' bytes of a node.
std::uint64_t busiest_node(const kit::SharedArray<std::uint64_t>& of_ranks, std::uint32_t iteration,
                           const RunPlan& plan);
// What the time of an operation is bounded by. `link_us`: the busiest node's needed bytes at the rate; 0: no
// rate.
std::string bound_of(double time_us, double link_us, std::uint32_t ranks, std::uint32_t cores);
// One operation of a run. `no_raw`: why raw UCX was not measured.
Json make_nodes_report(const std::string& operation, const NodesPlan& plan, const RunPlan& run,
                       const Samples& samples, const std::string& no_raw);
std::string nodes_text(const Reports& reports);

}  // namespace epd::bench
