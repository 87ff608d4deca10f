#pragma once

#include "kernels/reference.h"
#include "kit/report.h"
#include "kit/team.h"
#include "model.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace epd::demo {

// The demo's plan, and what its ranks measure.
struct DemoPlan {
  ModelShape model;
  std::uint32_t steps = 3;      // measured forward passes; one more before them measures operations alone
  std::uint32_t tokens = 128;   // of each rank and step, in two micro-batches
  std::uint32_t sum_ranks = 0;  // ranks of a sum domain; 0: the daemon's choice
  std::uint32_t nodes = 1;      // with a daemon each, in namespaces
  std::string text_path;        // empty: the shipped text
  std::string socket;           // of a running daemon; empty: start one
  std::string program;          // epd; empty: beside this executable
  std::string dump_routing;     // file, or empty
  bool json = false;

  kernels::reference::GroupParams params() const {
    kernels::reference::GroupParams p;
    p.num_ranks = model.num_ranks;
    p.num_experts = model.gate.num_experts;
    p.hidden = model.hidden;
    p.topk = model.gate.topk;
    p.payload = kernels::reference::Payload::kFp8Cast;
    p.sum_ranks = sum_ranks;
    return p;
  }
  std::uint32_t passes() const { return steps + 1; }
  // Tokens of a micro-batch: the first takes the odd one.
  std::uint32_t micro_batch(std::uint32_t m) const { return m == 0 ? tokens - tokens / 2 : tokens / 2; }
  std::uint32_t max_tokens() const { return micro_batch(0); }
  // Layers whose buffers stay untouched until they have been compared: two slots each, 16 at most.
  std::uint32_t segment() const { return std::min(model.num_layers, 8u); }
};

inline constexpr std::uint32_t kMicroBatches = 2;
inline constexpr std::uint32_t kProbes = 6;  // of each operation, alone
inline constexpr std::uint32_t kSamplesPerLayer = kMicroBatches * kProbes;

// Measurements of one layer on one rank. Times in us.
struct LayerRecord {
  double dispatch_us[kSamplesPerLayer];  // alone: submission to the end of the wait
  double combine_us[kSamplesPerLayer];
  double dispatch_ceiling_us[2][kSamplesPerLayer];  // copies: begin and end, on the clock that all share
  double combine_ceiling_us[2][kSamplesPerLayer];
  double moved_rows[kMicroBatches];  // rows this rank pushed in one probe, its own included
  // Sums over the measured steps, communication and computation overlapping.
  double operation_us;  // submission to completion
  double blocked_us;    // of that, the time in which this process only waited
  std::uint64_t received_rows;
  kit::Verdict verdict;  // on results compared with kernels/reference
};

// Data that a rank publishes after a segment, so that each rank can run the oracle.
struct Publication {
  Publication(const DemoPlan& plan)
      : x(std::size_t{plan.max_tokens()} * plan.model.hidden),
        topk_idx(std::size_t{plan.max_tokens()} * plan.model.gate.topk),
        topk_weights(std::size_t{plan.max_tokens()} * plan.model.gate.topk),
        y(std::size_t{plan.max_tokens()} * plan.model.num_ranks * plan.model.hidden),
        received(1) {}

  kit::SharedArray<std::uint16_t> x;
  kit::SharedArray<std::int32_t> topk_idx;
  kit::SharedArray<float> topk_weights;
  kit::SharedArray<std::uint16_t> y;
  kit::SharedArray<std::uint32_t> received;  // rows of y
};

// Shared by the ranks and the parent; made before the fork.
struct DemoRecords {
  explicit DemoRecords(const DemoPlan& plan)
      : layers(std::size_t{plan.model.num_layers} * plan.model.num_ranks),
        step_us(std::size_t{plan.steps} * plan.model.num_ranks),
        checksums(std::size_t{plan.passes()} * plan.model.num_ranks),
        expert_counts(std::size_t{plan.model.num_layers} * plan.model.gate.num_experts),
        row_counts(std::size_t{plan.model.num_ranks} * plan.model.num_ranks),
        routing(std::size_t{plan.passes()} * plan.model.num_layers * plan.model.num_ranks * plan.tokens *
                plan.model.gate.topk),
        link_bytes(std::size_t{plan.passes()} + 1),
        sum_ranks(1),
        daemon(64) {
    for (std::uint32_t rank = 0; rank < plan.model.num_ranks; ++rank) published.emplace_back(plan);
  }

  kit::SharedArray<LayerRecord> layers;           // [layers, R]
  kit::SharedArray<double> step_us;               // [steps, R]
  kit::SharedArray<std::uint64_t> checksums;      // [passes, R] of the final hidden states' bits
  kit::SharedArray<std::uint64_t> expert_counts;  // [layers, E] selections in the measured steps
  kit::SharedArray<std::uint32_t> row_counts;     // [R,R] of the current micro-batch
  kit::SharedArray<std::int32_t> routing;         // [passes, layers, R, tokens, K]
  kit::SharedArray<std::uint64_t>
      link_bytes;  // [passes + 1] sent between nodes before each pass and at the end
  kit::SharedArray<std::uint32_t> sum_ranks;  // what the daemon has chosen, or was asked for
  kit::SharedArray<char> daemon;              // its name and version
  std::vector<Publication> published;
};

kit::Json make_report(const DemoPlan& plan, const DemoRecords& records);
std::string to_text(const kit::Json& report);

}  // namespace epd::demo
