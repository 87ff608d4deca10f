#include "raw_ucx.h"

#include "kit/daemon.h"
#include "kit/error.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <sstream>
#include <system_error>
#include <thread>

#include <sched.h>
#include <unistd.h>

namespace epd::bench {
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

// Both ends poll: on one processor each would wait for the other's time slice. None if there is one only.
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
  // What an engine says to UCX itself: all is eager, and copied.
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
  // Another one for each run: nobody waits for the last one's connections.
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

}  // namespace epd::bench
