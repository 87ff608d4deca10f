#include "plan.h"

#include "kit/config_shape.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "kit/random.h"
#include "proto/shape_rules.h"

#include <algorithm>

namespace epd::bench {

// ---- plan

epd_group_config_t RunPlan::config() const {
  epd_group_config_t config;
  epd_group_config_init(&config);
  config.num_ranks = ranks;
  config.num_experts = experts;
  config.max_tokens = max_tokens();
  config.hidden = hidden;
  config.topk = topk;
  config.depth = depth;
  config.payload = payload;
  config.sms = sms;
  config.layout = layout;
  config.scale_format = scales;
  config.scale_layout = scale_layout;
  config.expert_alignment = alignment;
  config.opaque_bytes = opaque_bytes;
  config.num_biases = biases;
  config.max_recv_rows = max_recv_rows;
  config.priority = priority;
  config.sum_ranks = sum_ranks;
  config.span = nodes > 1 ? EPD_SPAN_CLUSTER : EPD_SPAN_NODE;
  return config;
}

abi::GroupShape RunPlan::shape() const {
  return test::shape_of(config());
}

kernels::reference::GroupParams RunPlan::params() const {
  return test::params_of(config());
}

std::string RunPlan::device_of(std::uint32_t rank) const {
  if (on_gpus()) return "cuda:" + std::to_string(rank % gpus);
  return "host:" + std::to_string(kit::place_of(rank, ranks, nodes).device);
}

std::string RunPlan::wait_name() const {
  if (!in_stream) return "no stream";
  const bool shares_gpus = ranks > gpus;  // then groups have MEMOP waits, whatever was asked for
  const epd_wait_by_t by = shares_gpus && wait_by == EPD_WAIT_BY_KERNEL ? EPD_WAIT_BY_MEMOP : wait_by;
  return word_of(kWaits, by) + std::string(graph ? " graph" : "");
}

std::string RunPlan::mode() const {
  const std::string its_layout =
      layout == EPD_LAYOUT_COMPACT ? "" : word_of(kLayouts, layout) + std::string(" ");
  const std::string its_scales =
      scales == EPD_SCALE_FORMAT_FLOAT32 ? "" : std::string(" ") + word_of(kScales, scales);
  return its_layout + word_of(kPayloads, payload) + its_scales;
}

kit::RoutingSpec RunPlan::routing_spec() const {
  kit::RoutingSpec spec = kit::parse_routing(routing);
  spec.num_experts = experts;
  spec.topk = topk;
  spec.seed = seed;
  return spec;
}

bool RunPlan::checks(std::uint32_t iteration) const {
  if (check == CheckLevel::kNone) return false;
  if (check == CheckLevel::kOne) return iteration == kit::Random(seed ^ 0xc4ec).below(iterations);
  if (check == CheckLevel::kAll || iteration == 0 || iteration + 1 == iterations) return true;
  return kit::Random(kit::derive(seed ^ 0xc4ec, iteration)).unit() * iterations < 4.0;
}

RunPlan::Columns RunPlan::checked_columns(std::uint32_t rank) const {
  constexpr std::uint32_t kWindow = 1024;  // blocks of 128 have a scale each, and four of them share a word
  constexpr std::uint32_t kStep = 512;
  constexpr std::uint64_t kLargeCast = std::uint64_t{1} << 25;
  const bool large = std::uint64_t{ranks} * tokens * topk * hidden > kLargeCast && hidden > kWindow;
  if (check != CheckLevel::kOne || payload != EPD_PAYLOAD_FP8_CAST || !large) return {0, hidden};
  const std::uint32_t places = (hidden - kWindow) / kStep + 1;
  return {kStep * kit::Random(kit::derive(seed ^ 0xc01, rank)).below(places), kWindow};
}

namespace {

// A value that is no default is refused where nothing would show it.
void refuse_what_means_nothing(const RunPlan& plan) {
  struct Use {
    bool given;
    bool has_meaning;
    const char* why_not;
  };
  const bool rows = plan.operation != Operation::kNoop;
  const bool fp8 = plan.payload == EPD_PAYLOAD_FP8_CAST || plan.payload == EPD_PAYLOAD_FP8;
  const Use uses[] = {
      {plan.layout != EPD_LAYOUT_COMPACT, rows, "layout is about rows; allowed: with any op but noop"},
      {plan.payload != EPD_PAYLOAD_BF16, rows, "payload is about rows; allowed: with any op but noop"},
      {plan.max_recv_rows != 0, rows, "max-recv-rows is about rows; allowed: with any op but noop"},
      {plan.routing != "uniform", rows, "routing is about rows; allowed: with any op but noop"},
      {plan.overlap, rows, "overlap is about rows that move; allowed: with any op but noop"},
      {plan.scales != EPD_SCALE_FORMAT_FLOAT32, fp8,
       "scales are of FP8; allowed: with payload fp8, fp8-given"},
      {plan.scale_layout != EPD_SCALE_LAYOUT_ROW_MAJOR, fp8,
       "scale-layout is of FP8; allowed: with payload fp8, fp8-given"},
      {plan.alignment > 1, rows && plan.layout != EPD_LAYOUT_EXPERT,
       "alignment is about experts whose rows lie together; allowed: with layout packed, and with compact, "
       "whose counts it rounds up"},
      {plan.linger_us != 0, plan.on_gpus(), "linger-us is about GPUs; allowed: with backend cuda"},
      {plan.cached, plan.does_dispatch(), "cached is about dispatch; allowed: with op dispatch, both"},
      {plan.mark_unused, plan.does_dispatch(),
       "mark-unused is about dispatch; allowed: with op dispatch, both"},
      {plan.zero_padding, plan.does_dispatch() && plan.layout == EPD_LAYOUT_PACKED,
       "zero-padding is about the rows that align experts; allowed: with layout packed and op dispatch, "
       "both"},
      {plan.weighted, plan.does_combine(), "weighted is about combine; allowed: with op combine, both"},
      {plan.return_weights, plan.does_combine(),
       "return-weights is about combine; allowed: with op combine, both"},
      {plan.biases != 0, plan.does_combine(), "biases are combine's; allowed: with op combine, both"},
      {plan.sum_ranks != 0, plan.does_combine(),
       "sum-ranks is about combine; allowed: with op combine, both"},
  };
  for (const Use& use : uses) {
    if (use.given && !use.has_meaning) kit::fail(use.why_not);
  }
}

}  // namespace

void validate(const RunPlan& plan) {
  kit::require_range("ranks", plan.ranks, 1, kMaxRanks);
  kit::require_range("nodes", plan.nodes, 1, std::min(plan.ranks, kit::NodeNetwork::kMaxNodes));
  kit::require_range("tokens", plan.tokens, 0, abi::kMaxTokens);
  kit::require_range("iters", plan.iterations, 1, kMaxIterations);
  kit::require_range("warmup", plan.warmup, 0, kMaxIterations);
  if (plan.graph && !plan.on_gpus()) kit::fail("graph is about GPUs; allowed: with backend cuda");
  if (!plan.in_stream && (!plan.on_gpus() || plan.graph || plan.overlap))
    kit::fail("no-stream is about GPUs; allowed: with backend cuda, without graph and overlap");
  refuse_what_means_nothing(plan);
  kit::require_range("priority", plan.priority, abi::kMinPriority, abi::kMaxPriority);
  if (const std::string wrong = abi::check_shape(plan.shape()); !wrong.empty()) kit::fail(wrong);
  kit::RoutingSource(plan.routing_spec());  // refuses what it can't make
}

// ---- suite

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
