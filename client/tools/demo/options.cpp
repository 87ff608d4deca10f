#include "options.h"

#include "epd/epd.h"
#include "kit/error.h"
#include "kit/node_network.h"

#include <CLI/CLI.hpp>

#include <algorithm>

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

void require_range(const char* name, std::uint32_t value, std::uint32_t low, std::uint32_t high) {
  if (value >= low && value <= high) return;
  kit::fail(std::string(name) + " is " + std::to_string(value) + "; allowed: " + std::to_string(low) + ".." +
            std::to_string(high));
}

void require_multiple(const char* name, std::uint32_t value, std::uint32_t of) {
  if (value % of == 0) return;
  kit::fail(std::string(name) + " is " + std::to_string(value) + "; allowed: multiples of " +
            std::to_string(of));
}

void validate(const DemoPlan& plan) {
  const ModelShape& model = plan.model;
  require_range("ranks", model.num_ranks, 1, 64);
  require_range("nodes", plan.nodes, 1, std::min(model.num_ranks, kit::NodeNetwork::kMaxNodes));
  if (plan.nodes > 1 && !plan.socket.empty())
    kit::fail("nodes starts daemons of its own; allowed: without socket");
  require_range("sum-ranks", plan.sum_ranks, 0, model.num_ranks);
  require_range("layers", model.num_layers, 1, 64);
  require_range("steps", plan.steps, 1, 10'000);
  require_range("tokens", plan.tokens, 1, 8192);
  require_range("hidden", model.hidden, 16, 16384);
  require_multiple("hidden", model.hidden, 16);
  require_range("expert-rank", model.expert_rank, 4, 256);
  require_multiple("expert-rank", model.expert_rank, 4);
  require_range("experts", model.gate.num_experts, 1, 4096);
  require_multiple("experts", model.gate.num_experts, model.num_ranks);
  require_range("topk", model.gate.topk, 1, 32);
  const std::string error = kit::gate_error(model.gate);
  if (!error.empty()) kit::fail(error);
}

}  // namespace

bool parse_options(int argc, char** argv, DemoPlan& plan, int& exit_code) {
  CLI::App app(kAbout, "epd-moe-demo");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("epd-moe-demo ") + epd_version());
  app.add_option("--socket", plan.socket, "Attach to the daemon at this socket (default: start one)");
  app.add_option("--epd", plan.program, "The daemon to start (default: epd beside this program)");
  app.add_option("--text", plan.text_path, "The text (default: the shipped one)");
  app.add_option("--ranks", plan.model.num_ranks, "Client processes, on devices host:0 and up of their node")
      ->capture_default_str();
  app.add_option("--nodes", plan.nodes,
                 "Daemons in network namespaces of their own, over which the ranks are spread in order")
      ->capture_default_str();
  app.add_option("--sum-ranks", plan.sum_ranks,
                 "Ranks of a sum domain, whose rows combine adds up before it rounds them for another one "
                 "(0: the daemon's choice)")
      ->capture_default_str();
  app.add_option("--layers", plan.model.num_layers, "MoE layers")->capture_default_str();
  app.add_option("--steps", plan.steps, "Measured forward passes")->capture_default_str();
  app.add_option("--tokens", plan.tokens, "Tokens of each rank and step")->capture_default_str();
  app.add_option("--hidden", plan.model.hidden, "Values per token")->capture_default_str();
  app.add_option("--experts", plan.model.gate.num_experts, "Experts")->capture_default_str();
  app.add_option("--topk", plan.model.gate.topk, "Experts per token")->capture_default_str();
  app.add_option("--expert-rank", plan.model.expert_rank, "Rank of the low-rank experts")
      ->capture_default_str();
  app.add_option("--seed", plan.model.seed, "Of the weights")->capture_default_str();
  app.add_option("--dump-routing", plan.dump_routing, "Write the experts chosen, for epbench --routing");
  app.add_flag("--json", plan.json, "One JSON object instead of the table");
  try {
    app.parse(argc, argv);
    validate(plan);
    return true;
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error) == 0 ? 0 : 2;
  } catch (const kit::ToolError& error) {
    std::fprintf(stderr, "epd-moe-demo: %s\n", error.what());
    exit_code = 2;
  }
  return false;
}

}  // namespace epd::demo
