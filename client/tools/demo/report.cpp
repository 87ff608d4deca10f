#include "plan.h"

#include "kit/ceiling.h"
#include "kit/random.h"
#include "kit/report.h"

#include <algorithm>
#include <span>
#include <vector>

namespace epd::demo {
namespace {

using kit::add_verdicts;
using kit::differences_of;
using kit::format;

using kit::Json;
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

// One operation alone on one micro-batch: p50 of the slowest rank; GB/s (1e9 bytes) of the busiest rank.
Json figures_of(std::span<const LayerRecord> ranks, Times times, Spans ceilings, std::uint64_t row_bytes) {
  double busiest = 0;  // rows, mean of the micro-batches
  for (std::uint32_t m = 0; m < kMicroBatches; ++m) {
    double rows = 0;
    for (const LayerRecord& rank : ranks) rows = std::max(rows, rank.moved_rows[m]);
    busiest += rows / kMicroBatches;
  }
  const double megabytes = busiest * static_cast<double>(row_bytes) * 1e-3;
  const auto over = [](double part, double whole) { return whole > 0 ? part / whole : 0; };
  const double us = p50_of_slowest(ranks, times);
  const double gbps = over(megabytes, us);
  const double ceiling = over(megabytes, ceiling_us_of(ranks, ceilings));
  return {
      {"p50_us", us}, {"gbps", gbps}, {"ceiling_gbps", ceiling}, {"ceiling_fraction", over(gbps, ceiling)}};
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

Json report_layer(const DemoPlan& plan, const DemoRecords& records, std::uint32_t layer) {
  const std::size_t num_ranks = plan.model.num_ranks;
  const std::size_t experts = plan.model.gate.num_experts;
  const auto ranks =
      std::span<const LayerRecord>(records.layers.span()).subspan(layer * num_ranks, num_ranks);
  const auto counts =
      std::span<const std::uint64_t>(records.expert_counts.span()).subspan(layer * experts, experts);
  double blocked_us = 0, operation_us = 0;
  std::uint64_t rows = 0;
  std::vector<kit::Verdict> verdicts;
  for (const LayerRecord& rank : ranks) {
    blocked_us += rank.blocked_us;
    operation_us += rank.operation_us;
    rows += rank.received_rows;
    verdicts.push_back(rank.verdict);
  }
  Json report{{"layer", layer},
              {"tokens", plan.tokens * num_ranks},
              {"rows", rows / plan.steps},  // moved in a step, all ranks, each way
              {"dispatch", figures_of(ranks, &LayerRecord::dispatch_us, &LayerRecord::dispatch_ceiling_us,
                                      kit::dispatch_row_bytes(plan.params()))},
              {"combine", figures_of(ranks, &LayerRecord::combine_us, &LayerRecord::combine_ceiling_us,
                                     kit::combine_row_bytes(plan.model.hidden))},
              {"hidden_share", hidden_share(blocked_us, operation_us)},
              {"expert_skew", skew_of(counts)}};
  add_verdicts(report, verdicts);
  return report;
}

}  // namespace

Json make_report(const DemoPlan& plan, const DemoRecords& records) {
  const ModelShape& model = plan.model;
  Json layers = Json::array();
  std::uint64_t rows = 0;
  std::uint32_t checks = 0, failures = 0;
  for (std::uint32_t layer = 0; layer < model.num_layers; ++layer) {
    layers.push_back(report_layer(plan, records, layer));
    rows += layers.back().at("rows").get<std::uint64_t>();
  }
  double blocked_us = 0, operation_us = 0;
  for (const LayerRecord& record : records.layers.span()) {
    blocked_us += record.blocked_us;
    operation_us += record.operation_us;
    checks += record.verdict.checks;
    failures += record.verdict.failures;
  }
  std::uint64_t checksum = 0;  // of the final hidden states of all passes and ranks
  for (const std::uint64_t sum : records.checksums.span()) checksum = kit::mix64(checksum ^ sum);
  return {{"ranks", model.num_ranks},
          {"nodes", plan.nodes},
          {"sum_ranks", records.sum_ranks[0]},
          {"link_bytes",
           static_cast<double>(records.link_bytes[plan.passes()] - records.link_bytes[1]) / plan.steps},
          {"layers", layers},
          {"steps", plan.steps},
          {"tokens", plan.tokens},
          {"hidden", model.hidden},
          {"experts", model.gate.num_experts},
          {"topk", model.gate.topk},
          {"rows", rows},
          {"step_p50_us", kit::quantile(kit::slowest_rank(records.step_us.span(), model.num_ranks), 0.5)},
          {"hidden_share", hidden_share(blocked_us, operation_us)},
          {"checks", checks},
          {"failures", failures},
          {"checksum", format("%016llx", static_cast<unsigned long long>(checksum))},
          {"correct", failures == 0 && checks > 0},
          {"daemon", records.daemon.data()}};
}

std::string to_text(const Json& report) {
  const auto count = [&](const char* field) { return report.at(field).get<unsigned>(); };
  const auto value = [&](const char* field) { return report.at(field).get<double>(); };
  const auto percent = [](double share) { return format("%.0f %%", 100 * share); };
  const kit::Reports layers = report.at("layers");
  std::vector<kit::Column> columns{kit::column("layer", "layer"), kit::column("tokens", "tokens"),
                                   kit::column("rows", "rows")};
  for (const std::string operation : {"dispatch", "combine"}) {  // alone
    const auto field = [&](const std::string& title, const char* name, const char* pattern) {
      columns.push_back(
          {title, [=](const Json& r) { return kit::number(r.at(operation).at(name), pattern); }});
    };
    field(operation + " us", "p50_us", "%.0f");
    field("GB/s", "gbps", "%.2f");
    field("ceiling", "ceiling_gbps", "%.2f");
    columns.push_back(
        {"share", [=](const Json& r) { return percent(r.at(operation).at("ceiling_fraction")); }});
  }
  columns.push_back({"hidden", [=](const Json& r) { return percent(r.at("hidden_share")); }});
  columns.push_back(kit::column("skew", "expert_skew", "%.1f"));
  columns.push_back({"result", kit::verdict_of});
  std::string text = format(
      "%u ranks on %u node%s, %zu layers, %u steps of %u tokens a rank; H=%u E=%u K=%u, FP8 dispatch, BF16 "
      "combine, sums of %u ranks; %s\n\n",
      count("ranks"), count("nodes"), count("nodes") > 1 ? "s" : "", layers.size(), count("steps"),
      count("tokens"), count("hidden"), count("experts"), count("topk"), count("sum_ranks"),
      report.at("daemon").get<std::string>().c_str());
  text += kit::table(layers, columns);
  text += format("\nA step takes %.1f ms (p50); %s of its communication is hidden behind computation.\n",
                 value("step_p50_us") / 1e3, percent(value("hidden_share")).c_str());
  if (count("nodes") > 1) {
    const double megabytes = value("link_bytes") / 1e6;
    text += format(
        "%u nodes sent each other %.1f MB in a step, headers of the link included (%.2f MB a layer).\n",
        count("nodes"), megabytes, megabytes / static_cast<double>(layers.size()));
  }
  return text +
         format("%u results compared with kernels/reference, %u differ. Checksum of the hidden states: %s\n",
                count("checks"), count("failures"), report.at("checksum").get<std::string>().c_str()) +
         differences_of(layers);
}

}  // namespace epd::demo
