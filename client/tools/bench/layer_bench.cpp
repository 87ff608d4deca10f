#include "layer_bench.h"

#include "bench/attention.h"
#include "bench/gemm.h"
#include "coordinator.h"
#include "kit/error.h"
#include "kit/shared_array.h"
#include "kit/team.h"
#include "layer.h"
#include "report_parts.h"
#include "samples.h"
#include "start_barrier.h"

#include <algorithm>
#include <vector>

namespace epd::bench {
namespace {

constexpr std::chrono::seconds kLimit{300};

// A rank's part: the graph without operations, by [iterations, ranks].
void compute_alone(const RunPlan& plan, const BarrierWords& words, kit::TeamRank& self,
                   std::span<double> times_us) {
  GpuRank gpu(self.rank() % plan.gpus, false);
  StartBarrier barrier(gpu, words, self.rank());
  Layer layer(gpu, plan);
  // In place of what dispatch delivers. Equal values would take less power, and leave a higher clock.
  const GpuAddress rows = layer.make_random(plan.shape().recv_rows() * plan.hidden);
  const auto nothing = [](std::uint32_t) {};
  const LayerParts parts{[&](std::uint32_t micro_batch) { layer.enqueue_attention(micro_batch); },
                         [&](std::uint32_t) { layer.enqueue_experts(reinterpret_cast<void*>(rows)); }};
  enqueue_layers(1, plan.micro_batches, parts, {nothing, nothing, nothing, nothing});
  gpu.settle();
  void* const graph = gpu.capture([&] {
    barrier.enqueue();
    gpu.record_begin();
    enqueue_layers(plan.layers, plan.micro_batches, parts, {nothing, nothing, nothing, nothing});
    gpu.record_end();
  });
  // Beside the daemon two other graphs are replayed between two replays of this one. A GPU that has worked as
  // long has a lower clock, so this one is replayed as often before it is measured.
  const std::uint32_t warmup = plan.warmup + 2 * plan.iterations;
  for (std::uint32_t i = 0; i < warmup + plan.iterations; ++i) {
    gpu.settle();
    self.start_together();
    gpu.launch(graph);
    barrier.open();
    gpu.settle();
    if (i >= warmup) times_us[std::size_t{i - warmup} * plan.ranks + self.rank()] = gpu.elapsed_us();
  }
  self.barrier();
}

// Adds the iterations' slowest ranks.
void measure_alone(const RunPlan& plan, std::vector<double>& times_us) {
  const kit::SharedArray<double> times(std::size_t{plan.iterations} * plan.ranks);
  const BarrierWords words(plan.ranks);
  kit::Team team(plan.ranks);
  kit::Team::Options options;
  options.limit = kLimit;
  team.run([&](kit::TeamRank& self) { compute_alone(plan, words, self, times.span()); }, options);
  for (const double time : kit::slowest_rank(times.span(), plan.ranks)) times_us.push_back(time);
}

kit::Summary per_layer(std::vector<double> times_us, const RunPlan& plan) {
  for (double& time : times_us) time /= plan.layers;
  return kit::summarize(times_us);
}

std::string shape_of(const RunPlan& plan) {
  return plan.layer_shape == LayerShape::kDecode ? "decode" : "prefill";
}

}  // namespace

void validate_layer(const RunPlan& plan) {
  require_range("micro-batches", plan.micro_batches, 1, 2);
  const auto require_multiple = [](const char* name, std::uint32_t value, std::uint32_t of) {
    if (value == 0 || value % of != 0)
      kit::fail(std::string(name) + " is " + std::to_string(value) + "; allowed: multiples of " +
                std::to_string(of));
  };
  require_multiple("tokens", plan.tokens * plan.micro_batches, kGemmTile * plan.micro_batches);
  require_multiple("hidden", plan.hidden, kGemmTile);
  require_multiple("context", plan.context, kSplitTokens);
  validate(plan);
}

LayerReport measure_layer(const RunPlan& plan, const std::string& program) {
  std::vector<double> alone;
  measure_alone(plan, alone);
  Daemon daemon({.socket = "", .program = program},
                {.cuda = plan.gpus, .sms = plan.sms, .linger_us = plan.linger_us});
  LayerReport report;
  report.plan = plan;
  const auto samples = make_samples(plan);
  try {
    run_ranks(plan, daemon, "epbench layer", *samples);
  } catch (const kit::ToolError& error) {
    kit::fail(error.what() + daemon.log());
  }
  daemon.stop();
  measure_alone(plan, alone);
  const auto slowest = [&](const kit::SharedArray<double>& times) {
    return per_layer(kit::slowest_rank(times.span(), plan.ranks), plan);
  };
  report.layer = slowest(samples->layers_us);
  report.computing = slowest(samples->computing_us);
  report.moving = slowest(samples->moving_us);
  report.alone = per_layer(alone, plan);
  report.gpu = samples->gpu.data();
  report.gemm = samples->gemm.data();
  report.daemon = samples->daemon.data();
  report.correct = true;
  add_verdicts(samples->dispatch, report);
  add_verdicts(samples->combine, report);
  return report;
}

std::string to_json(const LayerReport& report) {
  const RunPlan& plan = report.plan;
  Json json{{"op", "layer"},
            {"shape", shape_of(plan)},
            {"ranks", plan.ranks},
            {"gpus", plan.gpus},
            {"sms", plan.sms},
            {"linger_us", plan.linger_us},
            {"wait", plan.wait_name()},
            {"layers", plan.layers},
            {"micro_batches", plan.micro_batches},
            {"tokens", plan.tokens * plan.micro_batches},
            {"context", plan.context},
            {"hidden", plan.hidden},
            {"iters", plan.iterations},
            {"layer_us", summary_json(report.layer)},
            {"computing_us", summary_json(report.computing)},
            {"moving_us", summary_json(report.moving)},
            {"alone_us", summary_json(report.alone)},
            {"over_alone", report.over_alone()},
            {"added_over_moving", report.added_over_moving()},
            {"gemm", report.gemm},
            {"gpu", report.gpu},
            {"daemon", report.daemon},
            {"checks", report.checks},
            {"correct", report.correct}};
  append_difference(report, json);
  return json.dump();
}

std::string to_table(const std::vector<LayerReport>& reports) {
  std::string text;
  for (const LayerReport& report : reports) {
    const RunPlan& plan = report.plan;
    text +=
        format("%s, %u tokens, %u layers in a graph, %u micro-batch%s, %u rank%s, wait by %s; %s; %s; %s\n",
               shape_of(plan).c_str(), plan.tokens * plan.micro_batches, plan.layers, plan.micro_batches,
               plan.micro_batches == 1 ? "" : "es", plan.ranks, plan.ranks == 1 ? "" : "s",
               plan.wait_name().c_str(), report.gpu.c_str(), report.gemm.c_str(), report.daemon.c_str());
    const std::pair<const char*, const kit::Summary*> rows[] = {
        {"layer", &report.layer},
        {"computing, beside the daemon", &report.computing},
        {"operations alone", &report.moving},
        {"computing, without a daemon", &report.alone}};
    text += format("%-30s %10s %10s\n", "us of a layer", "p50", "p99");
    for (const auto& [name, summary] : rows)
      text += format("%-30s %10.1f %10.1f\n", name, summary->p50, summary->p99);
    text += format(
        "layer / computing without a daemon: %.3f. What operations add, over their own time: %.2f. %s (%u)\n",
        report.over_alone(), report.added_over_moving(), verdict_of(report.correct, report.checks).c_str(),
        report.checks);
  }
  append_differences(reports, text);
  return text;
}

}  // namespace epd::bench
