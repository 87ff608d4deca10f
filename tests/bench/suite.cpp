#include "suite.h"

namespace epd::bench {
namespace {

constexpr std::uint32_t kRanks[] = {1, 2, 4};
constexpr std::uint32_t kTokens[] = {128, 4096};

void append(std::vector<Report>& all, std::vector<Report> more) {
  for (Report& report : more) all.push_back(std::move(report));
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
      plan.fp8 = false;
      plan.operation = Operation::kBoth;
      append(reports, run_ranks(plan, daemon, label + "bf16"));
      plan.fp8 = true;
      plan.operation = Operation::kDispatch;
      append(reports, run_ranks(plan, daemon, label + "fp8"));
    }
  }
  return reports;
}

}  // namespace epd::bench
