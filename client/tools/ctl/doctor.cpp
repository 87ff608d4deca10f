// epctl doctor: gathers, judges, prints.
#include "doctor.h"

#include "commands.h"
#include "table.h"
#include "units.h"

#include <algorithm>
#include <chrono>
#include <ostream>
#include <string_view>

namespace epd::ctl {
namespace {

using Kind = SocketFile::Kind;

void note_stale(const std::string& path, SocketFile& file) {
  if (file.kind == Kind::kUsable && is_stale(path)) file.kind = Kind::kStale;
}

// As clients do: the first of several paths, with colons between them, where a daemon may listen. Else the
// first.
void find_attach_socket(const std::string& paths, DaemonFacts& facts) {
  for (std::size_t begin = 0; begin <= paths.size();) {
    const std::size_t end = std::min(paths.find(':', begin), paths.size());
    const std::string path = paths.substr(begin, end - begin);
    SocketFile file = look_at_socket(path);
    note_stale(path, file);
    const bool found = file.kind != Kind::kMissing && file.kind != Kind::kStale;
    if (found || begin == 0) {
      facts.attach_path = path;
      facts.attach_file = std::move(file);
    }
    if (found) return;
    begin = end + 1;
  }
}

DaemonFacts ask_daemon(const Arguments& arguments, Connection& connection) {
  DaemonFacts facts;
  facts.control_path = arguments.socket;
  facts.control_file = look_at_socket(arguments.socket);
  const auto start = std::chrono::steady_clock::now();
  facts.failure = connection.call(v1::GetVersionRequest(), facts.version);
  const auto time = std::chrono::steady_clock::now() - start;
  facts.answer_us =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
  if (!facts.failure) facts.failure = connection.call(v1::GetStatusRequest(), facts.status);
  if (facts.failure) {
    facts.version.Clear();
    facts.status.Clear();
  }
  if (!facts.failure) {
    facts.attach_path = facts.status.daemon().socket_path();
    if (!facts.attach_path.empty()) facts.attach_file = look_at_socket(facts.attach_path);
    facts.open_files = open_files_of(facts.status.daemon().pid());
    return facts;
  }
  note_stale(facts.control_path, facts.control_file);
  if (!arguments.attach_socket.empty()) {
    find_attach_socket(arguments.attach_socket, facts);
  } else if (arguments.socket == kDefaultSocket) {  // where another daemon's is, only the daemon knows
    find_attach_socket("/run/epd/epd.sock", facts);
  }
  return facts;
}

const char* level_word(Level level) {
  switch (level) {
    case Level::kOk: return "OK";
    case Level::kWarn: return "WARN";
    case Level::kFail: return "FAIL";
  }
  return "";
}

const char* json_word(Level level) {
  switch (level) {
    case Level::kOk: return "ok";
    case Level::kWarn: return "warn";
    case Level::kFail: return "fail";
  }
  return "";
}

std::string coloured(Level level) {
  const char* colour = level == Level::kOk ? "\x1b[32m" : level == Level::kWarn ? "\x1b[33m" : "\x1b[31m";
  return std::string(colour) + level_word(level) + "\x1b[0m";
}

std::size_t count(const std::vector<Check>& checks, Level level) {
  return static_cast<std::size_t>(
      std::count_if(checks.begin(), checks.end(), [&](const Check& check) { return check.level == level; }));
}

void print(const std::vector<Check>& checks, Output& output) {
  std::size_t width = 0;
  for (const Check& check : checks) width = std::max(width, printable(check.name).size());
  const std::string indent(4 + 2 + width + 2, ' ');
  for (const Check& check : checks) {
    const std::string_view level = level_word(check.level);
    const std::string name = printable(check.name);
    output.out << (output.colour ? coloured(check.level) : std::string(level))
               << std::string(4 - level.size() + 2, ' ') << name << std::string(width - name.size() + 2, ' ')
               << printable(check.text) << '\n';
    if (!check.advice.empty()) output.out << indent << "-> " << printable(check.advice) << '\n';
  }
  output.out << '\n'
             << count(checks, Level::kOk) << " ok, " << counted(count(checks, Level::kWarn), "warning")
             << ", " << count(checks, Level::kFail) << " failed\n";
}

void print_json(const std::vector<Check>& checks, Output& output) {
  Json list = Json::array();
  for (const Check& check : checks) {
    list.push_back({{"level", json_word(check.level)},
                    {"name", check.name},
                    {"text", check.text},
                    {"advice", check.advice}});
  }
  Json document;
  document["checks"] = std::move(list);
  document["ok"] = count(checks, Level::kOk);
  document["warn"] = count(checks, Level::kWarn);
  document["fail"] = count(checks, Level::kFail);
  write_json(output, document);
}

}  // namespace

Exit run_doctor(const Arguments& arguments, Connection& connection, Output& output) {
  const DaemonFacts daemon = ask_daemon(arguments, connection);
  std::vector<Check> checks = judge_daemon(daemon, own_version());
  const auto append = [&](std::vector<Check> more) {
    checks.insert(checks.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  if (!daemon.failure) {
    append(judge_devices(daemon.status));
    append(judge_gpus(daemon.status));
    v1::GetConfigResponse config;
    if (!connection.call(v1::GetConfigRequest(), config)) append(judge_choice(config, daemon));
    if (daemon.status.daemon().has_cluster()) {
      ClusterFacts cluster;
      if (const auto failure = connection.call(v1::ListNodesRequest(), cluster.nodes)) {
        append({{Level::kFail, "cluster", "its state can't be read", failure->message}});
      } else {
        cluster.ports = probe_ports(cluster.nodes);
        append(judge_cluster(cluster));
      }
      if (const auto failure = connection.call(v1::ListFarEnginesRequest(), cluster.network)) {
        append({{Level::kFail, "network", "its state can't be read", failure->message}});
      } else {
        cluster.interfaces = probe_interfaces();
        append(judge_network(cluster));
      }
    }
  }
  append(judge_host(probe_host(), daemon.status));
  arguments.json ? print_json(checks, output) : print(checks, output);
  const bool problems =
      count(checks, Level::kFail) != 0 || (arguments.strict && count(checks, Level::kWarn) != 0);
  return problems ? Exit::kProblems : Exit::kOk;
}

}  // namespace epd::ctl
