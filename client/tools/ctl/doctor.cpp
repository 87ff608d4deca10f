// epctl doctor: gathers, judges, prints.
#include "doctor.h"

#include "commands.h"
#include "text.h"

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
  facts.failure = connection.try_call(v1::GetVersionRequest(), facts.version);
  const auto time = std::chrono::steady_clock::now() - start;
  facts.answer_us =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
  if (!facts.failure) facts.failure = connection.try_call(v1::GetStatusRequest(), facts.status);
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

// In JSON, in text, and its colour.
struct LevelWords {
  const char* json;
  const char* text;
  const char* colour;
};
const LevelWords& words_of(Level level) {
  static constexpr LevelWords kWords[] = {
      {"ok", "OK", "\x1b[32m"}, {"warn", "WARN", "\x1b[33m"}, {"fail", "FAIL", "\x1b[31m"}};
  return kWords[static_cast<std::size_t>(level)];
}

std::size_t count(const std::vector<Check>& checks, Level level) {
  return static_cast<std::size_t>(
      std::count_if(checks.begin(), checks.end(), [&](const Check& check) { return check.level == level; }));
}

std::string text_of(const std::vector<Check>& checks, bool colour) {
  std::size_t width = 0;
  for (const Check& check : checks) width = std::max(width, printable(check.name).size());
  const auto padded = [](std::string text, std::size_t columns) {
    text.resize(std::max(text.size(), columns), ' ');
    return text;
  };
  std::string text;
  for (const Check& check : checks) {
    const LevelWords& words = words_of(check.level);
    const std::string level = padded(words.text, 6);
    text += colour ? words.colour + level + "\x1b[0m" : level;
    text += padded(printable(check.name), width + 2) + printable(check.text) + "\n";
    if (!check.advice.empty())
      text += std::string(6 + width + 2, ' ') + "-> " + printable(check.advice) + "\n";
  }
  return text + "\n" + std::to_string(count(checks, Level::kOk)) + " ok, " +
         counted(count(checks, Level::kWarn), "warning") + ", " +
         std::to_string(count(checks, Level::kFail)) + " failed\n";
}

Json json_of(const std::vector<Check>& checks) {
  Json document = {{"checks", Json::array()}};
  for (const Check& check : checks) {
    document["checks"].push_back({{"level", words_of(check.level).json},
                                  {"name", check.name},
                                  {"text", check.text},
                                  {"advice", check.advice}});
  }
  for (const Level level : {Level::kOk, Level::kWarn, Level::kFail})
    document[words_of(level).json] = count(checks, level);
  return document;
}

}  // namespace

Exit run_doctor(const Context& context) {
  Connection& connection = context.connection;
  const DaemonFacts daemon = ask_daemon(context.arguments, connection);
  std::vector<Check> checks = judge_daemon(daemon, own_version());
  const auto append = [&](std::vector<Check> more) {
    checks.insert(checks.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  if (!daemon.failure) {
    append(judge_devices(daemon.status));
    append(judge_gpus(daemon.status));
    v1::GetConfigResponse config;
    if (!connection.try_call(v1::GetConfigRequest(), config)) append(judge_choice(config, daemon));
    v1::ListGroupsResponse groups;
    if (!connection.try_call(v1::ListGroupsRequest(), groups)) append(judge_rows(groups));
    if (daemon.status.daemon().has_cluster()) {
      ClusterFacts cluster;
      if (const auto failure = connection.try_call(v1::ListNodesRequest(), cluster.nodes)) {
        append({fail("cluster", "its state can't be read", failure->message)});
      } else {
        cluster.ports = probe_ports(cluster.nodes);
        append(judge_cluster(cluster));
      }
      if (const auto failure = connection.try_call(v1::ListFarEnginesRequest(), cluster.network)) {
        append({fail("network", "its state can't be read", failure->message)});
      } else {
        cluster.interfaces = probe_interfaces();
        append(judge_network(cluster));
      }
    }
  }
  append(judge_host(probe_host(), daemon.status));
  context.answer(json_of(checks), text_of(checks, context.output.colour));
  const bool problems =
      count(checks, Level::kFail) != 0 || (context.arguments.strict && count(checks, Level::kWarn) != 0);
  return problems ? Exit::kProblems : Exit::kOk;
}

}  // namespace epd::ctl
