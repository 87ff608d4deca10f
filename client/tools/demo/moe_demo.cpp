// epd-moe-demo: see README.md and --help.
#include "kit/daemon.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "kit/options.h"
#include "kit/routing.h"
#include "model.h"
#include "plan.h"
#include "rank.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>

#include <unistd.h>

namespace epd::demo {
namespace {

constexpr const char* kAbout =
    "A forward pass through Mixture-of-Experts layers of DeepSeek-V3's shape, on several client processes "
    "of\n"
    "one epd daemon, or of one on each of several nodes: sigmoid gate with group-limited top-k on hidden\n"
    "states made from a text, FP8 dispatch, low-rank SwiGLU experts, BF16 combine, two micro-batches so "
    "that\n"
    "communication hides behind computation. Every result of every layer is compared bit for bit with the\n"
    "reference.";

constexpr const char* kFooter =
    "Exit status: 0 all results bit-exact; 1 a result differed or the run failed; 2 a wrong option.\n"
    "Columns: dispatch and combine alone (one micro-batch, p50, slowest rank; GB/s of the busiest rank;\n"
    "ceiling: plain copies of the same bytes in the same run); hidden: share of communication time during\n"
    "which the client computed; skew: the busiest expert's load over the mean.";

void validate(const DemoPlan& plan) {
  const ModelShape& model = plan.model;
  kit::require_range("nodes", plan.nodes, 1, std::min(model.num_ranks, kit::NodeNetwork::kMaxNodes));
  if (plan.nodes > 1 && !plan.socket.empty())
    kit::fail("nodes starts daemons of its own; allowed: without socket");
  kit::require_range("sum-ranks", plan.sum_ranks, 0, model.num_ranks);
  kit::require_multiple("hidden", model.hidden, 16);
  kit::require_multiple("expert-rank", model.expert_rank, 4);
  kit::require_multiple("experts", model.gate.num_experts, model.num_ranks);
  const std::string error = kit::gate_error(model.gate);
  if (!error.empty()) kit::fail(error);
}

bool parse_options(int argc, char** argv, DemoPlan& plan, int& exit_code) {
  CLI::App app(kAbout, "epd-moe-demo");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("epd-moe-demo ") + epd_version());
  app.add_option("--socket", plan.socket, "Attach to the daemon at this socket (default: start one)");
  app.add_option("--epd", plan.program, "The daemon to start (default: epd beside this program)");
  app.add_option("--text", plan.text_path, "The text (default: the shipped one)");
  ModelShape& model = plan.model;
  kit::add_number(app, "--ranks", model.num_ranks, 1, 64,
                  "Client processes, on devices host:0 and up of their node");
  kit::add_number(app, "--nodes", plan.nodes, 1, kit::NodeNetwork::kMaxNodes,
                  "Daemons in network namespaces of their own, over which the ranks are spread in order");
  kit::add_number(app, "--sum-ranks", plan.sum_ranks, 0, 64,
                  "Ranks of a sum domain, whose rows combine adds up before it rounds them for another one "
                  "(0: the daemon's choice)");
  kit::add_number(app, "--layers", model.num_layers, 1, 64, "MoE layers");
  kit::add_number(app, "--steps", plan.steps, 1, 10'000, "Measured forward passes");
  kit::add_number(app, "--tokens", plan.tokens, 1, 8192, "Tokens of each rank and step");
  kit::add_number(app, "--hidden", model.hidden, 16, 16384, "Values per token");
  kit::add_number(app, "--experts", model.gate.num_experts, 1, 4096, "Experts");
  kit::add_number(app, "--topk", model.gate.topk, 1, 32, "Experts per token");
  kit::add_number(app, "--expert-rank", model.expert_rank, 4, 256, "Rank of the low-rank experts");
  kit::add_number(app, "--seed", model.seed, 0, UINT64_MAX, "Seed of the weights");
  app.add_option("--dump-routing", plan.dump_routing, "Write the experts chosen, for epbench --routing");
  app.add_flag("--json", plan.json, "One JSON object instead of the table");
  return kit::parse(app, argc, argv, exit_code, [&] { validate(plan); });
}

std::string read_text(const std::string& given) {
  const std::string path = given.empty() ? kit::executable_directory() + "/" EPD_DEMO_TEXT : given;
  std::ifstream file(path);
  std::ostringstream text;
  if (file && text << file.rdbuf()) return text.str();
  kit::fail("no text at '" + path + "': give one with --text");
}

void dump_routing(const DemoPlan& plan, const DemoRecords& records) {
  if (plan.dump_routing.empty()) return;
  std::ofstream file(plan.dump_routing);
  const std::uint32_t topk = plan.model.gate.topk;
  const std::int32_t* choices = records.routing.data();
  for (std::uint32_t pass = 0; pass < plan.passes(); ++pass) {
    for (std::uint32_t layer = 0; layer < plan.model.num_layers; ++layer) {
      for (std::uint32_t rank = 0; rank < plan.model.num_ranks; ++rank) {
        for (std::uint32_t t = 0; t < plan.tokens; ++t, choices += topk) {
          kit::write_routing_line(file, {pass, layer, rank, {choices, topk}});
        }
      }
    }
  }
  if (!file.flush()) kit::fail("writing '" + plan.dump_routing + "' failed");
}

// `nodes` is null for the daemon at plan.socket.
bool run(const DemoPlan& plan, const kit::OwnNodes* nodes) {
  DemoRecords records(plan);
  kit::CopyCeiling ceiling(plan.params(), plan.max_tokens());
  DemoContext context;
  context.plan = plan;
  context.nodes = nodes;
  if (nodes == nullptr) context.sockets.push_back(plan.socket);
  for (std::uint32_t node = 0; nodes != nullptr && node < nodes->size(); ++node)
    context.sockets.push_back(nodes->daemon(node).socket());
  context.group = "moe-demo-" + std::to_string(::getpid());
  context.pieces = split_into_pieces(read_text(plan.text_path));
  if (context.pieces.empty()) kit::fail("the text '" + plan.text_path + "' has no words");
  for (std::uint32_t i = 0; i < plan.model.num_layers; ++i) context.gates.emplace_back(plan.model, i);
  context.ceiling = &ceiling;
  context.records = &records;
  {
    const kit::ProgressLine progress("layer", plan.passes() * plan.model.num_layers);
    kit::Team team(plan.model.num_ranks);
    kit::Team::Options options;
    if (nodes != nullptr) options.daemons = nodes->pids();
    options.on_progress = [&progress](std::uint32_t done) { progress.show(done); };
    team.run([&context](kit::TeamRank& self) { DemoRank(context, self).run(); }, options);
  }
  dump_routing(plan, records);
  const kit::Json report = make_report(plan, records);
  const std::string text = plan.json ? report.dump() + "\n" : to_text(report);
  std::fputs(text.c_str(), stdout);
  return report.at("correct");
}

int run_tool(const DemoPlan& plan) {
  std::optional<kit::OwnNodes> own;
  try {
    if (plan.socket.empty()) {
      const std::uint32_t devices = (plan.model.num_ranks + plan.nodes - 1) / plan.nodes;
      own.emplace(kit::NodesOptions{.program = plan.program, .nodes = plan.nodes, .devices = devices});
    }
    const bool correct = run(plan, own ? &*own : nullptr);
    const std::string outcome = own ? own->stop() : "";
    if (!outcome.empty()) kit::fail(outcome);
    return correct ? 0 : 1;
  } catch (const kit::ToolError& error) {
    std::fprintf(stderr, "epd-moe-demo: %s\n", error.what());
    if (own) std::fprintf(stderr, "%s\n", own->log_tail().c_str());
    return 1;
  }
}

}  // namespace
}  // namespace epd::demo

int main(int argc, char** argv) {
  epd::demo::DemoPlan plan;
  int exit_code = 0;
  if (!epd::demo::parse_options(argc, argv, plan, exit_code)) return exit_code;
  return epd::demo::run_tool(plan);
}
