// epbench nodes: operations of a group that spans nodes, and raw UCX on the same links, in turn.
#pragma once

#include "kit/report.h"
#include "plan.h"
#include "samples.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace epd::bench {

inline constexpr std::uint32_t kMaxPairs = 1000;
inline constexpr std::uint32_t kMaxPairIterations = 100'000;

struct NodesPlan {
  RunPlan run;  // its ranks and tokens follow from the rest
  std::uint32_t ranks_per_node = 2;
  std::string rate;                                 // limit of each node's link: "4gbit"; empty: none
  std::string check;                                // network.check; empty: the daemon's default
  std::vector<std::uint32_t> tokens{4096, 128, 1};  // a run each
  std::uint32_t pairs = 5;                          // of a measurement of ours and one of raw UCX
  std::uint32_t pair_iterations = 0;                // of ours; 0: 3 from 1024 tokens on, else 20

  // Throws kit::ToolError naming the bad value and what is allowed.
  void validate() const;
  RunPlan run_of(std::uint32_t with_tokens) const;
};

// Starts daemons on nodes of their own. Returns the reports of all runs. This process must have one thread.
Reports measure_nodes(const NodesPlan& plan, const std::string& program);

// The largest sum, over the nodes, of their ranks' bytes in one iteration.
std::uint64_t busiest_node(const kit::SharedArray<std::uint64_t>& of_ranks, std::uint32_t iteration,
                           const RunPlan& plan);
// Names what bounds the time of an operation. `link_us` is the time of the busiest node's needed bytes at the
// rate; 0: no rate.
std::string bound_of(double time_us, double link_us, std::uint32_t ranks, std::uint32_t cores);
// The report of one operation of a run. `no_raw` says why raw UCX was not measured.
Json make_nodes_report(const std::string& operation, const NodesPlan& plan, const RunPlan& run,
                       const Samples& samples, const std::string& no_raw);
std::string nodes_text(const Reports& reports);

// Bytes that must cross between nodes in an operation for one rank, as a source of dispatch and as an owner
// of tokens in combine. They are computed from routing and protocol, not from what was sent.
struct FarBytes {
  std::uint64_t pairs = 0;  // (token, other node) with an expert of the token's there
  std::uint64_t rows = 0;   // dispatch: one record for each pair
  std::uint64_t sums = 0;   // combine: one for each (token, domain) or, where several nodes share a domain,
                            // for each (token, rank)
  std::uint64_t asks = 0;   // combine: its requests to other nodes
  std::uint64_t announcements = 0;  // to other nodes, of one operation
};

// topk_idx: [tokens, topk], -1: none.
FarBytes far_bytes(const RunPlan& plan, std::uint32_t rank, std::span<const std::int32_t> topk_idx);

}  // namespace epd::bench
