#include "plan.h"

#include "kit/config_shape.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "kit/random.h"
#include "proto/shape_rules.h"

#include <algorithm>

namespace epd::bench {

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

}  // namespace epd::bench
