#include "suite.h"

#include <algorithm>

namespace epd::bench {
namespace {

constexpr std::uint32_t kRanks[] = {1, 2, kSuiteRanks};
constexpr std::uint32_t kDecode = 128;
constexpr std::uint32_t kTraining = 4096;
constexpr std::uint32_t kFewSms = 8;
constexpr std::uint32_t kDecodeSms[] = {32, 16};

RunPlan noop(RunPlan plan) {
  plan.operation = Operation::kNoop;
  return plan;
}

// Dispatch of fp8 rows, dispatch and combine of bf16 rows.
void append_compact(RunPlan plan, std::uint32_t tokens, const std::string& label,
                    std::vector<SuiteRun>& runs) {
  plan.tokens = tokens;
  plan.payload = EPD_PAYLOAD_BF16;
  plan.operation = Operation::kBoth;
  runs.push_back({plan, label + "bf16"});
  plan.payload = EPD_PAYLOAD_FP8_CAST;
  plan.operation = Operation::kDispatch;
  runs.push_back({plan, label + "fp8"});
}

// Decode: few tokens, each expert's rows in a block with room for several times its share.
RunPlan expert(RunPlan plan) {
  plan.operation = Operation::kBoth;
  plan.tokens = kDecode;
  plan.layout = EPD_LAYOUT_EXPERT;
  plan.payload = EPD_PAYLOAD_FP8_CAST;
  plan.max_recv_rows = std::min(64u, plan.ranks * plan.tokens);
  return plan;
}

// On GPUs, where the hand-off counts: MEMOP wait and KERNEL wait.
void append_both_waits(RunPlan plan, const std::string& label, std::vector<SuiteRun>& runs) {
  plan.wait_by = EPD_WAIT_BY_MEMOP;
  runs.push_back({plan, label});
  plan.wait_by = EPD_WAIT_BY_KERNEL;
  runs.push_back({plan, label + ", by kernel"});
}

// On GPUs: by graphs that are replayed, and call by call.
void append_graph(RunPlan plan, const std::string& label, std::vector<SuiteRun>& runs) {
  if (!plan.on_gpus()) return;
  plan.wait_by = EPD_WAIT_BY_KERNEL;
  plan.graph = true;
  runs.push_back({plan, label + ", graph"});
}
void append_call_and_graph(RunPlan plan, const std::string& label, std::vector<SuiteRun>& runs) {
  if (!plan.on_gpus()) return;
  plan.wait_by = EPD_WAIT_BY_KERNEL;
  runs.push_back({plan, label + ", by kernel"});
  append_graph(plan, label, runs);
}

void append_no_stream(RunPlan plan, const std::string& label, std::vector<SuiteRun>& runs) {
  plan.in_stream = false;
  runs.push_back({plan, label + ", no stream"});
}

// The dispatch of fp8 rows, that of bf16 rows, and the combine.
void append_decode(RunPlan plan, std::vector<SuiteRun>& runs) {
  for (const std::uint32_t sms : kDecodeSms) {
    plan.sms = sms;
    RunPlan decode = expert(plan);
    decode.operation = Operation::kDispatch;
    append_call_and_graph(decode, "suite: expert fp8", runs);
    decode.operation = Operation::kBoth;
    decode.payload = EPD_PAYLOAD_BF16;
    append_call_and_graph(decode, "suite: expert bf16", runs);
  }
  plan.sms = kDecodeSms[0];
  RunPlan single = expert(plan);
  single.tokens = 1;
  single.max_recv_rows = 0;
  append_call_and_graph(single, "suite: 1 token", runs);
}

// Training: many tokens, packed for grouped GEMM.
RunPlan packed(RunPlan plan) {
  plan.operation = Operation::kBoth;
  plan.tokens = kTraining;
  plan.layout = EPD_LAYOUT_PACKED;
  plan.alignment = 128;
  if (plan.on_gpus())
    plan.max_recv_rows = plan.tokens * plan.topk * 3 / 2;  // half as much again as an even share
  return plan;
}

std::vector<SuiteRun> host_runs(const RunPlan& base) {
  std::vector<SuiteRun> runs;
  for (const std::uint32_t ranks : kRanks) {
    RunPlan plan = base;
    plan.ranks = ranks;
    const std::string label = "suite: " + std::to_string(ranks) + " ranks, ";
    runs.push_back({noop(plan), label + "noop"});
    for (const std::uint32_t tokens : {kDecode, kTraining})
      append_compact(plan, tokens, label + std::to_string(tokens) + " tokens, ", runs);
    runs.push_back({expert(plan), label + "expert"});
    runs.push_back({packed(plan), label + "packed"});
  }
  return runs;
}

std::vector<SuiteRun> cuda_runs(RunPlan plan) {
  std::vector<SuiteRun> runs;
  plan.check = CheckLevel::kOne;
  append_both_waits(noop(plan), "suite: noop", runs);
  append_graph(noop(plan), "suite: noop", runs);
  append_no_stream(noop(plan), "suite: noop", runs);
  append_compact(plan, kTraining, "suite: ", runs);
  RunPlan few = plan;
  few.sms = kFewSms;
  append_compact(few, kTraining, "suite: few SMs, ", runs);
  append_compact(plan, 2 * kTraining, "suite: twice the tokens, ", runs);
  RunPlan pair = plan;
  pair.ranks = 2;
  pair.gpus = std::min(pair.gpus, pair.ranks);
  if (plan.ranks > 2) append_compact(pair, kTraining, "suite: 2 ranks, ", runs);
  RunPlan zipf = plan;
  zipf.routing = "zipf";
  append_compact(zipf, kTraining, "suite: zipf, ", runs);
  append_both_waits(expert(plan), "suite: expert", runs);
  append_no_stream(expert(plan), "suite: expert", runs);
  append_decode(plan, runs);
  runs.push_back({packed(plan), "suite: packed"});
  return runs;
}

void shrink(RunPlan& plan) {
  plan.tokens = std::max(1u, plan.tokens / 64);
  plan.hidden = 1024;
  plan.experts = 16;
  plan.max_recv_rows = 0;
}

}  // namespace

std::vector<SuiteRun> suite_runs(const RunPlan& base, bool small) {
  std::vector<SuiteRun> runs = base.on_gpus() ? cuda_runs(base) : host_runs(base);
  for (SuiteRun& run : runs) {
    if (small) shrink(run.plan);
  }
  return runs;
}

}  // namespace epd::bench
