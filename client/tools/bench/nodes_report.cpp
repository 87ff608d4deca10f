// Plans and figures of groups that span nodes, and their table.
#include "kit/ceiling.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "nodes_bench.h"
#include "proto/far.h"

#include <unistd.h>
#include <algorithm>
#include <span>
#include <vector>

namespace epd::bench {

// ---- far bytes

namespace {

std::uint64_t sum_bytes(const RunPlan& plan) {
  return abi::far_sum_bytes(kit::combine_row_bytes(plan.hidden), plan.return_weights ? plan.topk : 0);
}

class Places {
 public:
  explicit Places(const RunPlan& plan) : experts_per_rank_(plan.experts / plan.ranks) {
    for (std::uint32_t rank = 0; rank < plan.ranks; ++rank)
      nodes_.push_back(kit::place_of(rank, plan.ranks, plan.nodes).node);
    const std::uint32_t domain = plan.sum_ranks == 0 ? plan.ranks : plan.sum_ranks;
    for (std::uint32_t rank = 0; rank < plan.ranks; ++rank) {
      const std::uint32_t first = rank / domain * domain;
      const std::uint32_t last = std::min(first + domain, plan.ranks) - 1;
      summed_by_.push_back(nodes_[first] == nodes_[last] ? first : rank);
    }
  }
  std::uint32_t rank_of(std::int32_t expert) const {
    return static_cast<std::uint32_t>(expert) / experts_per_rank_;
  }
  std::uint32_t node_of(std::uint32_t rank) const { return nodes_[rank]; }
  // Equal for ranks whose rows cross as one sum.
  std::uint32_t sum_of(std::uint32_t rank) const { return summed_by_[rank]; }
  std::uint32_t ranks_of(std::uint32_t node) const {
    return static_cast<std::uint32_t>(std::count(nodes_.begin(), nodes_.end(), node));
  }

 private:
  std::uint32_t experts_per_rank_;
  std::vector<std::uint32_t> nodes_, summed_by_;
};

std::uint64_t distinct(std::vector<std::uint32_t>& values) {
  std::sort(values.begin(), values.end());
  return static_cast<std::uint64_t>(std::unique(values.begin(), values.end()) - values.begin());
}

std::uint64_t announcement_bytes(const RunPlan& plan, std::uint32_t ranks_there) {
  const bool per_expert = plan.layout != EPD_LAYOUT_COMPACT;
  const std::uint64_t counts = ranks_there * (per_expert ? plan.experts / plan.ranks : 1);
  return sizeof(abi::FarHeader) + sizeof(abi::FarAnnouncement) + sizeof(std::uint32_t) * counts;
}

}  // namespace

FarBytes far_bytes(const RunPlan& plan, std::uint32_t rank, std::span<const std::int32_t> topk_idx) {
  const Places places(plan);
  const std::uint32_t own = places.node_of(rank);
  FarBytes bytes;
  std::uint64_t records = 0;
  std::vector<std::uint32_t> nodes, sums;
  for (std::size_t at = 0; at < topk_idx.size(); at += plan.topk) {
    nodes.clear(), sums.clear();
    for (const std::int32_t expert : topk_idx.subspan(at, plan.topk)) {
      if (expert < 0 || places.node_of(places.rank_of(expert)) == own) continue;
      nodes.push_back(places.node_of(places.rank_of(expert)));
      sums.push_back(places.sum_of(places.rank_of(expert)));
    }
    bytes.pairs += distinct(nodes);
    records += distinct(sums);
  }
  bytes.rows = bytes.pairs * abi::far_row_bytes(kit::dispatch_row_bytes(plan.params()), plan.topk);
  bytes.asks = bytes.pairs * abi::far_ask_bytes(plan.topk);
  bytes.sums = records * sum_bytes(plan);
  for (std::uint32_t node = 0; node < plan.nodes; ++node) {
    if (node != own) bytes.announcements += announcement_bytes(plan, places.ranks_of(node));
  }
  return bytes;
}

// ---- nodes report

// Plans and figures of groups that span nodes, and their table.

namespace {

using kit::column;
using kit::differences_of;
using kit::number;
using kit::table;
using kit::verdict_of;

double median(const std::vector<double>& values) {
  return kit::quantile(values, 0.5);
}

constexpr std::uint32_t kManyTokens = 1024;
// A client that waits, its engine's loop and the engine's proxy.
constexpr std::uint32_t kPollingThreads = 3;

}  // namespace

RunPlan NodesPlan::run_of(std::uint32_t with_tokens) const {
  RunPlan made = run;
  made.ranks = run.nodes * ranks_per_node;
  made.tokens = with_tokens;
  made.iterations = pairs * (pair_iterations != 0 ? pair_iterations : with_tokens >= kManyTokens ? 3 : 20);
  if (made.sum_ranks == 0) made.sum_ranks = ranks_per_node;
  return made;
}

void NodesPlan::validate() const {
  kit::require_range("nodes", run.nodes, 1, kit::NodeNetwork::kMaxNodes);
  kit::require_range("ranks-per-node", ranks_per_node, 1, kMaxRanks);
  kit::require_range("pairs", pairs, 1, kMaxPairs);
  kit::require_range("iters", pair_iterations, 0, kMaxPairIterations);
  kit::bits_per_second(rate);
  for (const std::uint32_t each : tokens) bench::validate(run_of(each));
}

std::uint64_t busiest_node(const kit::SharedArray<std::uint64_t>& of_ranks, std::uint32_t iteration,
                           const RunPlan& plan) {
  std::vector<std::uint64_t> nodes(plan.nodes);
  for (std::uint32_t rank = 0; rank < plan.ranks; ++rank)
    nodes[kit::place_of(rank, plan.ranks, plan.nodes).node] +=
        of_ranks[std::size_t{iteration} * plan.ranks + rank];
  return *std::max_element(nodes.begin(), nodes.end());
}

std::string bound_of(double time_us, double link_us, std::uint32_t ranks, std::uint32_t cores) {
  if (link_us > time_us / 2) return "link";
  const std::uint32_t threads = kPollingThreads * ranks;
  return threads > cores ? kit::format("processors: %u threads that poll, %u cores", threads, cores)
                         : "hand-offs";
}

Json make_nodes_report(const std::string& operation, const NodesPlan& plan, const RunPlan& run,
                       const Samples& samples, const std::string& no_raw) {
  const bool dispatch = operation == "dispatch";
  const OperationSamples& measured = dispatch ? samples.dispatch : samples.combine;
  const std::vector<double> times = kit::slowest_rank(measured.time_us.span(), run.ranks);
  const kit::Summary time = kit::summarize(times);
  std::uint64_t link = 0, needed = 0, asked = 0;
  for (const std::uint64_t bytes : measured.link_bytes.span()) link += bytes;
  for (const std::uint64_t bytes : measured.needed_bytes.span()) needed += bytes;
  for (std::size_t i = 0; i < measured.n; ++i)
    asked += measured.request_bytes[i] + measured.record_bytes[i] - measured.needed_bytes[i];
  Json report{
      {"op", operation},        {"nodes", run.nodes},     {"ranks", run.ranks}, {"sum_ranks", run.sum_ranks},
      {"tokens", run.tokens},   {"hidden", run.hidden},   {"topk", run.topk},   {"experts", run.experts},
      {"rows", run.mode()},     {"routing", run.routing}, {"seed", run.seed},   {"rate", plan.rate},
      {"iters", run.iterations}};
  kit::add_times(report, time);
  report.update({{"noop_p50_us", kit::quantile(samples.noop_us.span(), 0.5)},
                 {"link_bytes", link},
                 {"needed_bytes", needed},
                 {"asked_bytes", asked},
                 {"link_bytes_over_needed",
                  needed != 0 ? Json(static_cast<double>(link) / static_cast<double>(needed)) : Json()}});
  if (!no_raw.empty()) report["no_raw"] = no_raw;
  // For each pair of ours and raw UCX: the speed of the records that the busiest node must send, or times.
  std::vector<double> own_mibps, raw_mibps, shares, raw_us, added;
  const std::uint32_t each = run.iterations / plan.pairs;
  for (std::uint32_t pair = 0; pair < plan.pairs; ++pair) {
    const double us = kit::quantile(std::span(times).subspan(std::size_t{pair} * each, each), 0.5);
    const auto bytes = static_cast<double>(busiest_node(measured.record_bytes, (pair + 1) * each - 1, run));
    const double trip = dispatch ? samples.raw_dispatch_us[pair] : samples.raw_combine_us[pair];
    if (samples.raw_stream_mibps[pair] > 0 && us > 0) {
      own_mibps.push_back(bytes / us * 1e6 / (1 << 20));
      raw_mibps.push_back(samples.raw_stream_mibps[pair]);
      shares.push_back(own_mibps.back() / raw_mibps.back());
    } else if (trip > 0) {
      raw_us.push_back(trip);
      added.push_back(us - trip);
    }
  }
  if (!shares.empty())
    report.update({{"own_mibps", median(own_mibps)},
                   {"raw_mibps", median(raw_mibps)},
                   {"shares", shares},
                   {"share_of_raw", median(shares)}});
  if (!added.empty()) report.update({{"raw_round_trip_us", median(raw_us)}, {"added_us", median(added)}});
  const double bits = kit::bits_per_second(plan.rate);
  const auto most = static_cast<double>(busiest_node(measured.needed_bytes, run.iterations - 1, run));
  const double link_us = bits > 0 ? most * 8 / bits * 1e6 : 0;
  const auto cores = static_cast<std::uint32_t>(::sysconf(_SC_NPROCESSORS_ONLN));
  report.update({{"bound", bound_of(time.p50, link_us, run.ranks, cores)}, {"cores", cores}});
  kit::add_verdicts(report, measured.verdicts.span());
  report["daemon"] = samples.daemon.data();
  return report;
}

std::string nodes_text(const Reports& reports) {
  if (reports.empty()) return "";
  const Json& first = reports.front();
  const auto text = [&](const char* field) { return first.at(field).get<std::string>(); };
  const auto count = [&](const char* field) { return first.at(field).get<unsigned>(); };
  const auto per_operation = [](const Json& r) {
    return kit::format("%.0f", r.at("link_bytes").get<double>() / r.at("iters").get<double>());
  };
  const auto of_raw = [](const Json& r) {
    if (r.contains("share_of_raw")) return number(r.at("share_of_raw"), "%.3f");
    return r.contains("added_us") ? number(r.at("added_us"), "%+.0f us") : "";
  };
  return kit::format("%u nodes x %u ranks, link %s, H=%u E=%u K=%u, %s, sums of %u ranks; %s\n",
                     count("nodes"), count("ranks") / count("nodes"),
                     text("rate").empty() ? "unshaped" : text("rate").c_str(), count("hidden"),
                     count("experts"), count("topk"), text("rows").c_str(), count("sum_ranks"),
                     text("daemon").c_str()) +
         table(reports, {column("op", "op"),
                         column("tokens", "tokens"),
                         column("p50 us", "p50_us", "%.1f"),
                         column("p99 us", "p99_us", "%.1f"),
                         {"link bytes", per_operation},
                         column("/needed", "link_bytes_over_needed", "%.4f"),
                         column("raw MiB/s", "raw_mibps"),
                         column("raw us", "raw_round_trip_us", "%.1f"),
                         {"of raw", of_raw},
                         {"result", verdict_of},
                         column("bound by", "bound")}) +
         "link bytes: of an operation, all nodes, by the interfaces' counters. of raw: share of "
         "ucx_perftest's\n"
         "stream, or time added to its round trip of the same bytes; medians of pairs.\n" +
         (first.contains("no_raw") ? "Raw UCX was not measured: " + text("no_raw") + ".\n" : "") +
         differences_of(reports);
}

}  // namespace epd::bench
