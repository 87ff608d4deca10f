// epbench nodes: operations of a group that spans nodes, and raw UCX on the same links, in turn.
#pragma once

#include "kit/statistics.h"
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

// One operation with so many tokens.
struct NodesReport {
  std::string operation;
  RunPlan plan;
  std::string rate;
  std::string daemon;
  kit::Summary time;  // us, slowest rank
  double noop_p50_us = 0;
  // Of all iterations.
  std::uint64_t link_bytes = 0;    // by the interfaces' counters
  std::uint64_t needed_bytes = 0;  // records of (token, node) and announcements
  std::uint64_t asked_bytes = 0;   // combine: asks, which are not counted as needed
  // Of raw UCX: not measured, because. Else, of each pair, one or the other.
  std::string no_raw;
  std::vector<double> own_mibps,
      raw_mibps;                       // records that the busiest node must send, in the time of an operation
  std::vector<double> own_us, raw_us;  // raw: what goes before the records one way, the records back
  double link_us = 0;                  // the busiest node's needed bytes at the rate; 0: no rate
  std::uint32_t cores = 0;
  std::uint32_t checks = 0;
  bool correct = false;
  std::string first_difference;

  double link_bytes_over_needed() const;
  std::vector<double> shares() const;  // own over raw, of each pair
  double added_us() const;             // median of own less raw
  std::string bound() const;           // what the time of an operation is bounded by
};

// Daemons on nodes of their own. Returns the reports of all runs. This process must have one thread.
std::vector<NodesReport> measure_nodes(const NodesPlan& plan, const std::string& program);

// Of one iteration: the largest sum of the ranks' bytes of a node.
std::uint64_t busiest_node(const kit::SharedArray<std::uint64_t>& of_ranks, std::uint32_t iteration,
                           const RunPlan& plan);
NodesReport make_nodes_report(const std::string& operation, const NodesPlan& plan, const RunPlan& run,
                              const Samples& samples);
std::string to_json(const NodesReport& report);  // one line
std::string to_table(const std::vector<NodesReport>& reports);

}  // namespace epd::bench
