#include "report.h"

#include "kit/ceiling.h"
#include "kit/format.h"
#include "kit/random.h"
#include "kit/statistics.h"

#include <algorithm>
#include <span>

#include <nlohmann/json.hpp>

namespace epd::demo {
namespace {

using Json = nlohmann::ordered_json;
using kit::format;
using Times = double (LayerRecord::*)[kSamplesPerLayer];
using Spans = double (LayerRecord::*)[2][kSamplesPerLayer];  // begins and ends

double p50_of_slowest(std::span<const LayerRecord> ranks, Times times) {
  std::vector<double> slowest(kSamplesPerLayer, 0);
  for (const LayerRecord& rank : ranks) {
    for (std::uint32_t i = 0; i < kSamplesPerLayer; ++i) slowest[i] = std::max(slowest[i], (rank.*times)[i]);
  }
  return kit::quantile(slowest, 0.5);
}

double ceiling_us_of(std::span<const LayerRecord> ranks, Spans spans) {
  std::vector<double> begins;
  std::vector<double> ends;
  for (std::uint32_t i = 0; i < kSamplesPerLayer; ++i) {
    for (const LayerRecord& rank : ranks) {
      begins.push_back((rank.*spans)[0][i]);
      ends.push_back((rank.*spans)[1][i]);
    }
  }
  return kit::ceiling_time_us(begins, ends, ranks.size());
}

OperationFigures figures_of(std::span<const LayerRecord> ranks, Times times, Spans ceilings,
                            std::uint64_t row_bytes) {
  double busiest = 0;  // rows, mean of the micro-batches
  for (std::uint32_t m = 0; m < kMicroBatches; ++m) {
    double rows = 0;
    for (const LayerRecord& rank : ranks) rows = std::max(rows, rank.moved_rows[m]);
    busiest += rows / kMicroBatches;
  }
  const double megabytes = busiest * static_cast<double>(row_bytes) * 1e-3;
  OperationFigures figures;
  figures.p50_us = p50_of_slowest(ranks, times);
  const double ceiling_us = ceiling_us_of(ranks, ceilings);
  if (figures.p50_us > 0) figures.gbps = megabytes / figures.p50_us;
  if (ceiling_us > 0) figures.ceiling_gbps = megabytes / ceiling_us;
  if (figures.ceiling_gbps > 0) figures.fraction = figures.gbps / figures.ceiling_gbps;
  return figures;
}

double hidden_share(double blocked_us, double operation_us) {
  return operation_us > 0 ? std::clamp(1 - blocked_us / operation_us, 0.0, 1.0) : 0;
}

double skew_of(std::span<const std::uint64_t> counts) {
  std::uint64_t sum = 0;
  for (const std::uint64_t count : counts) sum += count;
  const std::uint64_t most = *std::max_element(counts.begin(), counts.end());
  return sum == 0 ? 0
                  : static_cast<double>(most) * static_cast<double>(counts.size()) / static_cast<double>(sum);
}

LayerFigures layer_figures(const DemoPlan& plan, std::span<const LayerRecord> ranks) {
  LayerFigures figures;
  figures.dispatch = figures_of(ranks, &LayerRecord::dispatch_us, &LayerRecord::dispatch_ceiling_us,
                                kit::dispatch_row_bytes(plan.params()));
  figures.combine = figures_of(ranks, &LayerRecord::combine_us, &LayerRecord::combine_ceiling_us,
                               kit::combine_row_bytes(plan.model.hidden));
  double blocked_us = 0;
  double operation_us = 0;
  for (const LayerRecord& rank : ranks) {
    blocked_us += rank.blocked_us;
    operation_us += rank.operation_us;
    figures.rows += rank.received_rows;
    figures.checks += rank.checks;
    figures.failures += rank.failures;
    if (figures.first_difference.empty()) figures.first_difference = rank.first_difference;
  }
  figures.rows /= plan.steps;
  figures.hidden_share = hidden_share(blocked_us, operation_us);
  return figures;
}

Json to_json_object(const OperationFigures& figures) {
  return Json{{"p50_us", figures.p50_us},
              {"gbps", figures.gbps},
              {"ceiling_gbps", figures.ceiling_gbps},
              {"ceiling_fraction", figures.fraction}};
}

}  // namespace

DemoReport make_report(const DemoPlan& plan, const DemoRecords& records) {
  const std::uint32_t ranks = plan.model.num_ranks;
  DemoReport report;
  report.daemon = records.daemon.data();
  report.sum_ranks = records.sum_ranks[0];
  report.link_bytes =
      static_cast<double>(records.link_bytes[plan.passes()] - records.link_bytes[1]) / plan.steps;
  double blocked_us = 0;
  double operation_us = 0;
  for (std::uint32_t layer = 0; layer < plan.model.num_layers; ++layer) {
    const auto of_layer =
        std::span<const LayerRecord>(records.layers.span()).subspan(std::size_t{layer} * ranks, ranks);
    LayerFigures figures = layer_figures(plan, of_layer);
    const std::uint32_t experts = plan.model.gate.num_experts;
    figures.skew = skew_of(std::span<const std::uint64_t>(records.expert_counts.span())
                               .subspan(std::size_t{layer} * experts, experts));
    for (const LayerRecord& rank : of_layer) {
      blocked_us += rank.blocked_us;
      operation_us += rank.operation_us;
    }
    report.rows += figures.rows;
    report.checks += figures.checks;
    report.failures += figures.failures;
    report.layers.push_back(std::move(figures));
  }
  report.hidden_share = hidden_share(blocked_us, operation_us);
  report.step_p50_us = kit::quantile(kit::slowest_rank(records.step_us.span(), ranks), 0.5);
  for (const std::uint64_t sum : records.checksums.span())
    report.checksum = kit::mix64(report.checksum ^ sum);
  return report;
}

std::string to_table(const DemoPlan& plan, const DemoReport& report) {
  const ModelShape& model = plan.model;
  std::string text = format(
      "%u ranks on %u node%s, %u layers, %u steps of %u tokens a rank; H=%u E=%u K=%u, FP8 dispatch, BF16 "
      "combine, sums of %u ranks; %s\n\n",
      model.num_ranks, plan.nodes, plan.nodes > 1 ? "s" : "", model.num_layers, plan.steps, plan.tokens,
      model.hidden, model.gate.num_experts, model.gate.topk, report.sum_ranks, report.daemon.c_str());
  text += "                     |         dispatch, alone         |          combine, alone         |\n";
  text += "layer  tokens   rows |      us    GB/s ceiling  share  |      us    GB/s ceiling  share  | hidden";
  text += "  skew  result\n";
  for (std::size_t layer = 0; layer < report.layers.size(); ++layer) {
    const LayerFigures& row = report.layers[layer];
    text += format("%5zu  %6u %6llu |", layer, plan.tokens * model.num_ranks,
                   static_cast<unsigned long long>(row.rows));
    for (const OperationFigures* figures : {&row.dispatch, &row.combine}) {
      text += format(" %7.0f %7.2f %7.2f %5.0f %%  |", figures->p50_us, figures->gbps, figures->ceiling_gbps,
                     100 * figures->fraction);
    }
    text += format(" %4.0f %%  %4.1f  %s\n", 100 * row.hidden_share, row.skew,
                   row.failures == 0 ? "bit-exact" : "WRONG");
  }
  text += format("\nA step takes %.1f ms (p50); %.0f %% of its communication is hidden behind computation.\n",
                 report.step_p50_us / 1e3, 100 * report.hidden_share);
  if (plan.nodes > 1) {
    text += format(
        "%u nodes sent each other %.1f MB in a step, headers of the link included (%.2f MB a layer).\n",
        plan.nodes, report.link_bytes / 1e6, report.link_bytes / 1e6 / model.num_layers);
  }
  text += format(
      "%u results compared with kernels/reference, %u differ. Checksum of the hidden states: %016llx\n",
      report.checks, report.failures, static_cast<unsigned long long>(report.checksum));
  for (const LayerFigures& row : report.layers) {
    if (!row.first_difference.empty()) text += "first difference: " + row.first_difference + "\n";
  }
  return text;
}

std::string to_json(const DemoPlan& plan, const DemoReport& report) {
  Json layers = Json::array();
  for (const LayerFigures& row : report.layers) {
    layers.push_back({{"layer", layers.size()},
                      {"tokens", plan.tokens * plan.model.num_ranks},
                      {"rows", row.rows},
                      {"dispatch", to_json_object(row.dispatch)},
                      {"combine", to_json_object(row.combine)},
                      {"hidden_share", row.hidden_share},
                      {"expert_skew", row.skew},
                      {"checks", row.checks},
                      {"failures", row.failures}});
    if (!row.first_difference.empty()) layers.back()["first_difference"] = row.first_difference;
  }
  const ModelShape& model = plan.model;
  const Json json{{"ranks", model.num_ranks},
                  {"nodes", plan.nodes},
                  {"sum_ranks", report.sum_ranks},
                  {"link_bytes", report.link_bytes},
                  {"layers", layers},
                  {"steps", plan.steps},
                  {"tokens", plan.tokens},
                  {"hidden", model.hidden},
                  {"experts", model.gate.num_experts},
                  {"topk", model.gate.topk},
                  {"rows", report.rows},
                  {"step_p50_us", report.step_p50_us},
                  {"hidden_share", report.hidden_share},
                  {"checks", report.checks},
                  {"failures", report.failures},
                  {"checksum", format("%016llx", static_cast<unsigned long long>(report.checksum))},
                  {"correct", report.correct()},
                  {"daemon", report.daemon}};
  return json.dump();
}

}  // namespace epd::demo
