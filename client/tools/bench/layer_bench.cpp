#include "benchmarks.h"

#include "bench/kernel_arguments.h"
#include "kit/error.h"
#include "kit/team.h"
#include "layer.h"
#include "rank_device.h"
#include "samples.h"
#include "worker.h"

#include <algorithm>
#include <vector>

namespace epd::bench {
namespace {

using kit::add_verdicts;
using kit::column;
using kit::differences_of;
using kit::format;
using kit::summary_json;
using kit::table;
using kit::verdict_of;

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

}  // namespace

void validate_layer(const RunPlan& plan) {
  kit::require_range("micro-batches", plan.micro_batches, 1, 2);
  kit::require_multiple("tokens", plan.tokens * plan.micro_batches, kGemmTile * plan.micro_batches);
  kit::require_multiple("hidden", plan.hidden, kGemmTile);
  kit::require_multiple("context", plan.context, kSplitTokens);
  validate(plan);
}

Json measure_layer(const RunPlan& plan, const std::string& program) {
  std::vector<double> alone_us;
  measure_alone(plan, alone_us);
  kit::OwnDaemon daemon({.program = program,
                         .host_devices = 0,
                         .cuda_devices = plan.gpus,
                         .sms = plan.sms,
                         .linger_us = plan.linger_us});
  std::unique_ptr<Samples> samples;
  try {
    samples = run_ranks(plan, daemon, "epbench layer");
  } catch (const kit::ToolError& error) {
    kit::fail(error.what() + daemon.log_tail());
  }
  if (const std::string outcome = daemon.stop(); !outcome.empty()) kit::fail(outcome);
  measure_alone(plan, alone_us);
  const auto slowest = [&](const kit::SharedArray<double>& times) {
    return per_layer(kit::slowest_rank(times.span(), plan.ranks), plan);
  };
  const kit::Summary layer = slowest(samples->layers_us);
  const kit::Summary moving = slowest(samples->moving_us);
  const kit::Summary alone = per_layer(alone_us, plan);
  const auto ratio = [](double part, double whole) { return whole > 0 ? part / whole : 0; };
  Json report{{"op", "layer"},
              {"shape", word_of(kLayerShapes, plan.layer_shape)},
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
              {"layer_us", summary_json(layer)},
              {"computing_us", summary_json(slowest(samples->computing_us))},
              {"moving_us", summary_json(moving)},
              {"alone_us", summary_json(alone)},
              {"over_alone", ratio(layer.p50, alone.p50)},
              // The cost of the layer beyond computing, over the operations' own time.
              {"added_over_moving", ratio(layer.p50 - alone.p50, moving.p50)},
              {"gemm", samples->gemm.data()},
              {"gpu", samples->gpu.data()},
              {"daemon", samples->daemon.data()}};
  add_verdicts(report, samples->dispatch.verdicts.span());
  add_verdicts(report, samples->combine.verdicts.span());
  return report;
}

std::string layer_text(const Json& report) {
  const auto text = [&](const char* field) { return report.at(field).get<std::string>(); };
  const auto count = [&](const char* field) { return report.at(field).get<unsigned>(); };
  Reports rows;
  for (const auto& [name, field] : {std::pair("layer", "layer_us"),
                                    {"computing, beside the daemon", "computing_us"},
                                    {"operations alone", "moving_us"},
                                    {"computing, without a daemon", "alone_us"}}) {
    rows.push_back(report.at(field));
    rows.back()["name"] = name;
  }
  return format("%s, %u tokens, %u layers in a graph, %u micro-batch%s, %u rank%s, wait by %s; ",
                text("shape").c_str(), count("tokens"), count("layers"), count("micro_batches"),
                count("micro_batches") == 1 ? "" : "es", count("ranks"), count("ranks") == 1 ? "" : "s",
                text("wait").c_str()) +
         text("gpu") + "; " + text("gemm") + "; " + text("daemon") + "\n" +
         table(rows, {column("us of a layer", "name"), column("p50", "p50", "%.1f"),
                      column("p99", "p99", "%.1f")}) +
         format(
             "layer / computing without a daemon: %.3f. What operations add, over their own time: %.2f. %s\n",
             report.at("over_alone").get<double>(), report.at("added_over_moving").get<double>(),
             verdict_of(report).c_str()) +
         differences_of({report});
}

}  // namespace epd::bench
