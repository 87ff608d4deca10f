// epd-moe-demo: see README.md and --help.
#include "kit/daemon.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "kit/routing.h"
#include "options.h"
#include "rank.h"
#include "report.h"
#include "text.h"

#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>

#include <unistd.h>

namespace epd::demo {
namespace {

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

// `nodes`: null: plan.socket's daemon.
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
