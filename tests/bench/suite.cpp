#include "suite.h"

#include <algorithm>

namespace epd::bench {
namespace {

constexpr std::uint32_t kRanks[] = {1, 2, 4};
constexpr std::uint32_t kTokens[] = {128, 4096};

void append(std::vector<Report>& all, std::vector<Report> more) {
  for (Report& report : more) all.push_back(std::move(report));
}

// Decode: few tokens, each expert's rows in a block with room for several times its share. Training: many
// tokens, packed for grouped GEMM.
void append_modes(const RunPlan& base, std::uint32_t ranks, const Daemon& daemon,
                  std::vector<Report>& reports) {
  const std::string label = "suite: " + std::to_string(ranks) + " ranks, ";
  RunPlan plan = base;
  plan.ranks = ranks;
  plan.operation = Operation::kBoth;
  plan.tokens = 128;
  plan.layout = EPD_LAYOUT_EXPERT;
  plan.payload = EPD_PAYLOAD_FP8_CAST;
  plan.max_recv_rows = std::min(64u, ranks * plan.tokens);
  append(reports, run_ranks(plan, daemon, label + "expert"));
  plan.tokens = 4096;
  plan.layout = EPD_LAYOUT_PACKED;
  plan.payload = EPD_PAYLOAD_BF16;
  plan.alignment = 128;
  plan.max_recv_rows = 0;
  append(reports, run_ranks(plan, daemon, label + "packed"));
}

}  // namespace

std::vector<Report> run_suite(const RunPlan& base, const Daemon& daemon) {
  std::vector<Report> reports;
  for (const std::uint32_t ranks : kRanks) {
    RunPlan plan = base;
    plan.ranks = ranks;
    plan.operation = Operation::kNoop;
    const std::string rank_label = "suite: " + std::to_string(ranks) + " ranks";
    append(reports, run_ranks(plan, daemon, rank_label + ", noop"));
    for (const std::uint32_t tokens : kTokens) {
      const std::string label = rank_label + ", " + std::to_string(tokens) + " tokens, ";
      plan.tokens = tokens;
      plan.payload = EPD_PAYLOAD_BF16;
      plan.operation = Operation::kBoth;
      append(reports, run_ranks(plan, daemon, label + "bf16"));
      plan.payload = EPD_PAYLOAD_FP8_CAST;
      plan.operation = Operation::kDispatch;
      append(reports, run_ranks(plan, daemon, label + "fp8"));
    }
    append_modes(base, ranks, daemon, reports);
  }
  return reports;
}

}  // namespace epd::bench
