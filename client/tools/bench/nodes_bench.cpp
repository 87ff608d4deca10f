#include "nodes_bench.h"

#include "kit/daemon.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "kit/team.h"
#include "worker.h"

#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <future>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace epd::bench {

// ---- raw ucx

// Runs ucx_perftest between two nodes, with the settings of their engines.
class RawUcx {
 public:
  // Returns "" or what is missing on this machine.
  static std::string why_not();
  // Measures between node 0 and node 1. `batch_bytes` is the size of a message.
  RawUcx(const kit::OwnNodes& nodes, std::uint64_t batch_bytes);

  // MiB per second of the slower direction, while `bytes` go each way at the same time.
  double stream_mibps(std::uint64_t bytes) const;
  // The time of one message of `bytes` bytes: half of there and back, the median of several.
  double one_way_us(std::uint64_t bytes) const;

 private:
  // The program's options.
  struct Ends {
    std::vector<std::string> server;
    std::vector<std::string> client;
  };
  kit::CommandOptions on_node(std::uint32_t node) const;
  // Returns the numbers of the client's last line.
  std::vector<double> run(std::uint32_t from, std::uint32_t to, const Ends& ends) const;

  const kit::OwnNodes& nodes_;
  std::uint64_t batch_bytes_;
  std::vector<std::string> environment_;
};

namespace {

constexpr const char* kProgram = "ucx_perftest";

std::string contents(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void append(std::vector<std::string>& words, const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
}

std::vector<std::string> joined(std::vector<std::string> words, const std::vector<std::string>& more) {
  append(words, more);
  return words;
}

// Both ends poll, and on one processor each would wait for the other's time slice. Empty if there is only
// one.
std::vector<std::string> processor_of(std::uint32_t node) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return {};
  int processor = 0;
  for (std::uint32_t found = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &allowed) && found++ == node) break;
  }
  return {"-c", std::to_string(processor)};
}

// UCX's variables in the environment of the daemon's first engine.
std::vector<std::string> settings_of_engine(pid_t daemon) {
  const std::string process = "/proc/" + std::to_string(daemon);
  std::istringstream children(contents(process + "/task/" + std::to_string(daemon) + "/children"));
  for (pid_t child = 0; children >> child;) {
    std::vector<std::string> settings;
    std::istringstream variables(contents("/proc/" + std::to_string(child) + "/environ"));
    for (std::string variable; std::getline(variables, variable, '\0');) {
      if (variable.starts_with("UCX_")) settings.push_back(variable);
    }
    if (!settings.empty()) return settings;
  }
  kit::fail("no engine of process " + std::to_string(daemon) + " has settings of UCX in its environment");
}

bool listens(pid_t process, int port) {
  char wanted[16];
  std::snprintf(wanted, sizeof(wanted), ":%04X", static_cast<unsigned>(port));
  for (const char* table : {"tcp", "tcp6"}) {
    std::istringstream lines(contents("/proc/" + std::to_string(process) + "/net/" + table));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state;
      words >> number >> local >> remote >> state;
      if (local.ends_with(wanted) && state == "0A") return true;
    }
  }
  return false;
}

}  // namespace

std::string RawUcx::why_not() {
  return kit::has_command(kProgram) ? "" : "ucx_perftest is missing (ucx-utils)";
}

RawUcx::RawUcx(const kit::OwnNodes& nodes, std::uint64_t batch_bytes)
    : nodes_(nodes), batch_bytes_(batch_bytes), environment_(settings_of_engine(nodes.daemon(0).pid())) {
  // Settings that an engine gives to UCX itself: everything is eager and copied.
  for (const std::string setting : {"UCX_TLS=tcp", "UCX_RNDV_THRESH=inf", "UCX_ZCOPY_THRESH=inf"})
    environment_.push_back(setting);
  environment_.push_back(std::string("UCX_NET_DEVICES=") + kit::NodeNetwork::kInterface);
}

kit::CommandOptions RawUcx::on_node(std::uint32_t node) const {
  kit::CommandOptions options;
  options.environment = environment_;
  options.in_child = [this, node] {
    if (*nodes_.network().enter(node) != '\0') ::_exit(126);
  };
  return options;
}

std::vector<double> RawUcx::run(std::uint32_t from, std::uint32_t to, const Ends& ends) const {
  // Each run has a port of its own, so it need not wait for the connections of the run before.
  static std::atomic<int> last_port{20000};
  const int port = ++last_port;
  std::vector<std::string> serve{kProgram, "-p", std::to_string(port)};
  std::vector<std::string> all{kProgram, nodes_.network().address(to), "-p", std::to_string(port), "-e",
                               "-f"};
  append(serve, ends.server);
  append(all, ends.client);
  const kit::BackgroundCommand server(serve, on_node(to));
  for (int i = 0; i < 500 && !listens(server.pid(), port); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const std::string said = kit::must_run(all, on_node(from));
  std::vector<double> numbers;
  const std::string body = said.substr(0, said.find_last_not_of('\n') + 1);
  std::istringstream last(body.substr(body.find_last_of('\n') + 1));
  for (double value = 0; last >> value;) numbers.push_back(value);
  // Messages; us: median, average, overall; MiB/s: average, overall; messages a second.
  if (numbers.size() < 6) kit::fail(std::string(kProgram) + " gave no figures: " + said);
  return numbers;
}

// All four ends sleep while they have nothing to do: if they polled, they would take each other's processors.
double RawUcx::stream_mibps(std::uint64_t bytes) const {
  const std::uint64_t messages = std::max<std::uint64_t>(bytes / batch_bytes_, 64);
  const std::vector<std::string> sleeping{"-E", "sleep"};
  const Ends ends{sleeping, joined(sleeping, {"-t", "ucp_am_bw", "-s", std::to_string(batch_bytes_), "-n",
                                              std::to_string(messages), "-w", std::to_string(messages / 10),
                                              "-O", "16"})};
  const auto way = [&](std::uint32_t from, std::uint32_t to) { return run(from, to, ends)[5]; };
  std::future<double> back = std::async(std::launch::async, way, 1, 0);
  const double there = way(0, 1);
  return std::min(there, back.get());
}

double RawUcx::one_way_us(std::uint64_t bytes) const {
  const std::uint64_t size = std::max<std::uint64_t>(bytes, 1);
  const std::uint64_t messages = std::clamp<std::uint64_t>((std::uint64_t{64} << 20) / size, 20, 300);
  const Ends ends{processor_of(1), joined(processor_of(0), {"-t", "ucp_am_lat", "-s", std::to_string(size),
                                                            "-n", std::to_string(messages), "-w",
                                                            std::to_string(messages / 10 + 1)})};
  return run(0, 1, ends)[1];
}

// ---- nodes bench

namespace {

constexpr std::chrono::seconds kRunLimit{900};
constexpr std::uint64_t kBatchBytes = 256 << 10;                 // network.batch_bytes of the daemons
constexpr std::uint64_t kStreamBytes = std::uint64_t{16} << 20;  // compared as a stream from here on

double round_trip_us(const RawUcx& raw, const OperationSamples& samples, std::uint32_t iteration,
                     const RunPlan& plan) {
  return raw.one_way_us(busiest_node(samples.request_bytes, iteration, plan)) +
         raw.one_way_us(busiest_node(samples.record_bytes, iteration, plan));
}

void measure_raw(const RawUcx& raw, const RunPlan& plan, std::uint32_t pair, std::uint32_t iterations,
                 Samples& samples) {
  const std::uint32_t last = (pair + 1) * iterations - 1;
  const std::uint64_t bytes = busiest_node(samples.dispatch.record_bytes, last, plan);
  if (bytes >= kStreamBytes) {
    samples.raw_stream_mibps[pair] = raw.stream_mibps(bytes * iterations);
  } else {
    samples.raw_dispatch_us[pair] = round_trip_us(raw, samples.dispatch, last, plan);
    samples.raw_combine_us[pair] = round_trip_us(raw, samples.combine, last, plan);
  }
}

void measure(const NodesPlan& plan, const RunPlan& run, const kit::OwnNodes& nodes, const RawUcx* raw,
             Samples& samples) {
  RunContext context{
      run, {}, "epbench-nodes-" + std::to_string(run.tokens), kit::RoutingSource(run.routing_spec())};
  for (std::uint32_t node = 0; node < nodes.size(); ++node)
    context.sockets.push_back(nodes.daemon(node).socket());
  context.samples = &samples;
  context.nodes = &nodes;
  context.iterations_of_pair = run.iterations / plan.pairs;
  if (raw != nullptr) {
    context.after_pair = [&](std::uint32_t pair) {
      measure_raw(*raw, run, pair, context.iterations_of_pair, samples);
    };
  }
  kit::Team team(run.ranks);
  kit::Team::Options options;
  options.limit = kRunLimit;
  options.daemons = nodes.pids();
  team.run([&context](kit::TeamRank& self) { Worker(context, self).run(); }, options);
}

}  // namespace

Reports measure_nodes(const NodesPlan& plan, const std::string& program) {
  kit::OwnNodes nodes({.program = program,
                       .nodes = plan.run.nodes,
                       .devices = plan.ranks_per_node,
                       .sms = plan.run.sms,
                       .rate = plan.rate,
                       .check = plan.check});
  Reports reports;
  try {
    std::string no_raw = plan.run.nodes == 1 ? "one node has no link" : RawUcx::why_not();
    std::optional<RawUcx> raw;
    if (no_raw.empty()) raw.emplace(nodes, kBatchBytes);
    for (const std::uint32_t tokens : plan.tokens) {
      const RunPlan run = plan.run_of(tokens);
      Samples samples(run.iterations, run.ranks, std::size_t{run.iterations} * kNoopsBetween,
                      run.ranks * kit::targets_per_rank(run.params()));
      measure(plan, run, nodes, raw ? &*raw : nullptr, samples);
      for (const char* operation : {"dispatch", "combine"})
        reports.push_back(make_nodes_report(operation, plan, run, samples, no_raw));
    }
  } catch (const kit::ToolError& error) {
    kit::fail(error.what() + nodes.log_tail());
  }
  const std::string outcome = nodes.stop();
  if (!outcome.empty()) kit::fail(outcome);
  return reports;
}

}  // namespace epd::bench
