#include "options.h"

#include "benchmarks.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "kit/options.h"
#include "layer.h"
#include "proto/shape_rules.h"

#include <utility>

namespace epd::bench {
namespace {

using kit::add_field;
using kit::add_number;
using kit::add_word;
using kit::whole;

constexpr const char* kAbout =
    "Measures epd from client processes: one process per rank, results checked bit for bit against the\n"
    "reference, plain copies of the same bytes measured in the same run as the ceiling.\n"
    "Starts its own daemon with one emulated host device or GPU per rank, unless --socket names a running "
    "one.";

constexpr const char* kFooter =
    "Figures: p50_us.. of one operation, slowest rank of each iteration, from submission to the end of the\n"
    "wait, on GPUs between events in the client's stream; GB/s (1e9 bytes) for the busiest rank at p50.\n"
    "Definitions: client/tools/bench/README.md.\n"
    "Exit status: 0 all results correct; 1 a result was wrong or the run failed; 2 a wrong option.\n"
    "\nExamples:\n"
    "  epbench --ranks 4 --op both --tokens 128\n"
    "  epbench --op dispatch --payload fp8 --tokens 4096 --routing zipf --json\n"
    "  epbench suite\n"
    "  epbench suite --backend cuda\n"
    "  epbench nodes --nodes 2 --ranks-per-node 2 --rate 4gbit\n"
    "  epbench layer --ranks 2\n";

constexpr const char* kLayerFooter =
    "Figures, of a layer, the slowest rank of each iteration: layer_us with operations, computing_us "
    "without,\n"
    "moving_us operations alone, alone_us without operations and without a daemon.\n"
    "Definitions: client/tools/bench/README.md.\n"
    "Exit status: 0 all results correct; 1 a result was wrong or the run failed; 2 a wrong option.\n"
    "\nExamples:\n"
    "  epbench layer --ranks 2\n"
    "  epbench layer --ranks 2 --micro-batches 2 --context 4096\n"
    "  epbench layer --shape prefill --ranks 2 --json\n";

void add_daemon_options(CLI::App& app, Options& options) {
  app.add_option("--socket", options.daemon.socket, "Attach to the daemon at this socket instead");
  app.add_option("--epd", options.daemon.program, "The daemon to start (default: epd beside epbench)");
  app.add_flag("--json", options.json, "JSON, one object per line and operation, instead of a table");
}

void add_backend_option(CLI::App& app, RunPlan& run) {
  add_word(app, "--backend", run.backend, kBackends, "Devices: host (emulated, threads as SMs) or cuda");
}

void add_check_option(CLI::App& app, RunPlan& run) {
  add_word(app, "--check", run.check, kCheckLevels,
           "Iterations compared with the reference: all, some (first, last, about four more), one, none");
}

// Options that runs of every kind have: rows, routing, checks.
void add_shape_options(CLI::App& app, RunPlan& run) {
  add_field(app, "--hidden", run.hidden, "hidden", "Values per token, a multiple of 8");
  add_field(app, "--experts", run.experts, "num_experts", "Experts of the group, a multiple of the ranks");
  add_field(app, "--topk", run.topk, "topk", "Experts per token");
  add_number(app, "--sms", run.sms, 0, kMaxSms,
             "SMs (host: threads) of each device to use (0: the device's default)");
  app.add_option("--routing", run.routing, "uniform, zipf, group-limited, one-expert, or a routing file")
      ->capture_default_str();
  add_number(app, "--seed", run.seed, 0, UINT64_MAX, "Seed of routing and data");
  add_check_option(app, run);
}

void add_wait_option(CLI::App& app, RunPlan& run) {
  add_word(app, "--wait", run.wait_by, kWaits,
           "Backend cuda: by what a stream waits: memop (stream memory operations), kernel, or event (memop, "
           "and an "
           "event behind it)");
}

void add_run_options(CLI::App& app, RunPlan& run) {
  add_number(app, "--ranks", run.ranks, 1, kMaxRanks,
             "Client processes, rank r on host:r, or on cuda:r (in turn, if there are fewer)");
  add_word(app, "--op", run.operation, kOperations, "dispatch, combine, both or noop");
  add_number(app, "--tokens", run.tokens, 0, abi::kMaxTokens, "Tokens of each rank in each call");
  add_shape_options(app, run);
  add_number(app, "--iters", run.iterations, 1, kMaxIterations,
             "Measured iterations, each with its own routing");
  add_number(app, "--warmup", run.warmup, 0, kMaxIterations, "Iterations before these");
  add_field(app, "--depth", run.depth, "depth", "Buffer slots, used in turn (memory: see README)");
  app.add_flag("--warm-cache", run.warm_cache, "Flush no caches before the timed parts");
  add_wait_option(app, run);
  app.add_flag_callback(
      "--no-stream", [&run] { run.in_stream = false; },
      "Backend cuda: operations are submitted without a stream, and the CPU waits; times are the CPU's");
  app.add_flag("--graph", run.graph,
               "Backend cuda: each operation is a graph that was captured once, replayed");
  app.add_flag(
      "--overlap", run.overlap,
      "Backend cuda: measure too what a GEMM of the client's and the operation cost beside each other (with "
      "--graph: as one graph)");
}

void add_linger_option(CLI::App& app, RunPlan& run) {
  add_number(app, "--linger-us", run.linger_us, 0, abi::kMaxLingerUs,
             "GPUs: how long the SMs of an operation stay for the next one (devices.linger_us)");
}

void add_mode_options(CLI::App& app, RunPlan& run) {
  add_word(app, "--layout", run.layout, kLayouts, "Layout of received rows: compact, packed or expert");
  add_word(app, "--payload", run.payload, kPayloads,
           "What dispatch sends: bf16, fp8 (cast by the engine), fp8-given (with its scales) or opaque");
  add_word(app, "--scales", run.scales, kScales, "Scales of FP8: float32, pow2 or ue8m0");
  add_word(app, "--scale-layout", run.scale_layout, kScaleLayouts,
           "Layout of the scales of received FP8 rows: row_major or column_major");
  add_field(app, "--opaque-bytes", run.opaque_bytes, "opaque_bytes",
            "Bytes of a row of payload opaque, a multiple of 16");
  add_field(
      app, "--alignment", run.alignment, "expert_alignment",
      "Layout packed: rows that each expert's first row is aligned to; compact: that counts are rounded "
      "up to");
  add_field(app, "--max-recv-rows", run.max_recv_rows, "max_recv_rows",
            "Room for rows (layout expert: of each expert)");
  add_field(app, "--biases", run.biases, "num_biases", "Biases that combine adds");
  add_field(app, "--sum-ranks", run.sum_ranks, "sum_ranks",
            "Ranks of a sum domain, which combine adds up and rounds (0: the daemon's choice)");
  add_number(app, "--priority", run.priority, abi::kMinPriority, abi::kMaxPriority,
             "Priority of the operations on their devices, -8 .. 7");
  app.add_flag("--cached", run.cached, "dispatch uses the routing of another one just before it");
  app.add_flag("--weighted", run.weighted, "combine weighs rows by the top-k weights");
  app.add_flag("--return-weights", run.return_weights, "combine brings the rows' weights back");
  app.add_flag("--zero-padding", run.zero_padding, "dispatch zeroes the rows that align experts");
  app.add_flag("--mark-unused", run.mark_unused, "dispatch marks all rows that no token fills");
}

void add_nodes_options(CLI::App& app, Options& options) {
  NodesPlan& nodes = options.nodes;
  nodes.run.nodes = 2;
  nodes.run.depth = 1;
  app.add_option("--epd", options.daemon.program, "The daemons to start (default: epd beside epbench)");
  app.add_flag("--json", options.json, "JSON, one object per line and operation, instead of a table");
  add_number(app, "--nodes", nodes.run.nodes, 1, kit::NodeNetwork::kMaxNodes,
             "Daemons, each in network and IPC namespaces of its own");
  add_number(app, "--ranks-per-node", nodes.ranks_per_node, 1, kMaxRanks, "Client processes of each node");
  app.add_option("--rate", nodes.rate, "That each node sends at, as 4gbit (default: as fast as it goes)");
  app.add_option("--network-check", nodes.check, "network.check of the daemons (default: crc)");
  app.add_option("--tokens", nodes.tokens, "Tokens of each rank in each call, a run each; as 4096,128,1")
      ->delimiter(',')
      ->check(whole<std::uint32_t>(0, abi::kMaxTokens, "0.." + std::to_string(abi::kMaxTokens)))
      ->capture_default_str();
  add_number(app, "--pairs", nodes.pairs, 1, kMaxPairs, "Measurements of operations and of raw UCX, in turn");
  add_number(app, "--iters", nodes.pair_iterations, 0, kMaxPairIterations,
             "Iterations in each pair (0: 3 from 1024 tokens on, else 20)");
  add_shape_options(app, nodes.run);
  add_mode_options(app, nodes.run);
}

void add_layer_options(CLI::App& app, Options& options) {
  RunPlan& run = options.layer;
  static constexpr Word<Backend> kCudaOnly[] = {{"cuda", Backend::kCuda}};
  app.footer(kLayerFooter);
  run.backend = Backend::kCuda;
  add_word(app, "--backend", run.backend, kCudaOnly, "Devices: cuda");
  app.add_option("--epd", options.daemon.program, "The daemon to start (default: epd beside epbench)");
  app.add_flag("--json", options.json, "JSON, one object, instead of a table");
  add_wait_option(app, run);
  add_word(app, "--shape", run.layer_shape, kLayerShapes,
           "decode (128 tokens for each micro-batch, 64 sequences in all) or prefill (4096 tokens)");
  run.tokens = 0;
  add_number(app, "--tokens", run.tokens, 0, abi::kMaxTokens,
             "Tokens of each rank, a multiple of 128 for each micro-batch (0: the shape's)");
  add_number(app, "--context", run.context, 1, kMaxContext,
             "Decode: tokens of each sequence, a multiple of 512");
  run.layers = 4;
  add_number(app, "--layers", run.layers, 1, kMaxLayers, "Layers of a graph");
  add_number(app, "--micro-batches", run.micro_batches, 1, 2,
             "2: one half of the tokens computes while the other half's rows move");
  run.ranks = 1;
  add_number(app, "--ranks", run.ranks, 1, kMaxRanks, "Client processes, in turn on the GPUs");
  add_field(app, "--hidden", run.hidden, "hidden", "Values per token, a multiple of 128");
  add_number(app, "--sms", run.sms, 0, kMaxSms, "SMs of each device (0: the tool's default)");
  add_linger_option(app, run);
  add_number(app, "--iters", run.iterations, 1, kMaxIterations, "Measured iterations");
  add_number(app, "--seed", run.seed, 0, UINT64_MAX, "Seed of routing and data");
  add_check_option(app, run);
}

// Every token chooses all experts of a rank, so that an expert has as many rows as the rank has tokens.
void complete_layer(RunPlan& run) {
  const bool decode = run.layer_shape == LayerShape::kDecode;
  if (run.tokens == 0) run.tokens = decode ? 128 * run.micro_batches : 4096;
  if (run.tokens % run.micro_batches != 0)
    kit::fail("tokens is " + std::to_string(run.tokens) + "; allowed: multiples of micro-batches");
  run.tokens /= run.micro_batches;
  run.layout = decode ? EPD_LAYOUT_EXPERT : EPD_LAYOUT_COMPACT;
  run.experts = kLayerExperts * run.ranks;
  run.topk = kLayerExperts;
  run.depth = run.micro_batches;
  run.operation = Operation::kBoth;
  run.graph = true;
  run.warm_cache = true;
  validate_layer(run);
}

}  // namespace

bool parse_options(int argc, char** argv, Options& options, int& exit_code) {
  CLI::App app(kAbout, "epbench");
  app.footer(kFooter);
  RunPlan& run = options.run;
  add_daemon_options(app, options);
  add_backend_option(app, run);
  add_run_options(app, run);
  add_linger_option(app, run);
  add_mode_options(app, run);
  app.set_version_flag("--version", std::string("epbench ") + epd_version());
  CLI::App* suite = app.add_subcommand(
      "suite", "The tables of kernels/PERFORMANCE.md: ranks 1/2/4 x tokens 128/4096; on GPUs another set");
  CLI::App* attach = app.add_subcommand("attach", "Time to attach and to detach a session");
  CLI::App* reap = app.add_subcommand("reap", "Time from kill -9 of a client until its peer knows");
  for (CLI::App* command : {suite, attach, reap}) add_daemon_options(*command, options);
  add_number(*suite, "--iters", run.iterations, 1, kMaxIterations, "Measured iterations of each row");
  add_number(*suite, "--seed", run.seed, 0, UINT64_MAX, "Seed of routing and data");
  add_number(*suite, "--ranks", run.ranks, 1, kMaxRanks, "Backend cuda: client processes");
  suite->add_flag("--small", options.small_suite, "Few tokens and small rows: to see that all of it works");
  suite->add_flag("--warm-cache", run.warm_cache, "Flush no caches before the timed parts");
  add_backend_option(*suite, run);
  CLI::App* nodes = app.add_subcommand(
      "nodes", "A group that spans nodes: bytes on the links, time, and raw UCX on the same links in turn");
  add_nodes_options(*nodes, options);
  CLI::App* layer = app.add_subcommand(
      "layer",
      "A whole layer of a model on GPUs, with operations and without, beside the daemon and without it");
  add_layer_options(*layer, options);
  for (CLI::App* command : {attach, reap}) {
    add_number(*command, "--rounds", options.rounds, 1, 100'000, "Measurements");
  }
  app.require_subcommand(0, 1);
  return kit::parse(app, argc, argv, exit_code, [&] {
    if (*suite) options.command = Command::kSuite;
    if (*attach) options.command = Command::kAttach;
    if (*reap) options.command = Command::kReap;
    if (*nodes) {
      options.command = Command::kNodes;
      options.nodes.validate();
    }
    if (*layer) {
      options.command = Command::kLayer;
      complete_layer(options.layer);
      run = options.layer;
      return;
    }
    if (run.on_gpus() && (*attach || *reap)) kit::fail("attach and reap measure host devices only");
    if (!run.on_gpus() && app.count("--wait") + app.count("--overlap") != 0)
      kit::fail("wait and overlap are about streams; allowed: with backend cuda");
    if (*suite && !run.on_gpus() && suite->count("--ranks") != 0)
      kit::fail("ranks of the suite on host devices are 1, 2 and 4; allowed: with backend cuda");
    validate(run);
  });
}

}  // namespace epd::bench
