#include "benchmarks.h"

#include "common/signal.h"
#include "kit/error.h"
#include "kit/session.h"
#include "kit/team.h"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <system_error>
#include <thread>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace epd::bench {
namespace {

using kit::add_times;
using kit::column;
using kit::Column;
using kit::format;
using kit::table;

namespace fs = std::filesystem;

constexpr int kJoinPatienceMs = 10'000;

Json report_of(const char* name, const kit::SharedArray<double>& samples,
               const kit::SharedArray<char>& daemon) {
  Json report{{"op", name}, {"backend", "host"}};
  add_times(report, kit::summarize(samples.span()));
  report.update({{"correct", true}, {"daemon", daemon.data()}});
  return report;
}

void note_daemon(const kit::SessionPtr& session, const kit::SharedArray<char>& daemon) {
  std::strncpy(daemon.data(), kit::daemon_name(session.get()).c_str(), daemon.size() - 1);
}

kit::GroupPtr join_pair(epd_session_t* session, const std::string& name, int rank) {
  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = name.c_str();
  config.rank = rank;
  config.num_ranks = 2;
  config.num_experts = 16;
  config.max_tokens = 128;
  config.hidden = 7168;
  config.topk = 8;
  config.depth = 2;
  config.timeout_ms = kJoinPatienceMs;
  return kit::join(session, config);
}

// A client that joins as rank 1 and then does nothing. Forked before this process makes a thread; dies with
// its parent.
[[noreturn]] void be_victim(const std::string& socket, const std::string& group) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    const kit::SessionPtr session = kit::attach(socket, "host:1");
    const kit::GroupPtr membership = join_pair(session.get(), group, 1);
    for (;;) ::pause();
  } catch (const kit::ToolError& error) {
    std::fprintf(stderr, "epbench: the client to be killed: %s\n", error.what());
  }
  ::_exit(1);
}

struct ReapRound {
  double rank_lost_us = 0;
  double reuse_us = 0;
};

// Runs in its own process, which has one thread at the beginning.
ReapRound reap_once(const std::string& socket, const std::string& group,
                    const kit::SharedArray<char>& daemon) {
  const pid_t victim = ::fork();
  if (victim < 0) kit::fail_errno("fork");
  if (victim == 0) be_victim(socket, group);
  ReapRound round;
  const kit::SessionPtr session = kit::attach(socket, "host:0");
  note_daemon(session, daemon);
  const kit::GroupPtr membership = join_pair(session.get(), group, 0);
  const epd_buffers_t buffers = kit::buffers_of(membership.get(), 0);
  std::memset(buffers.topk_idx, 0, sizeof(std::int32_t) * 128 * 8);
  epd_ticket_t ticket = kit::submit_dispatch(membership.get(), 0, 128, nullptr);
  // Long enough for the survivor's engine to be waiting for the other rank.
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const double begin = kit::now_us();
  send_signal(victim, SIGKILL);
  const epd_status_t status = epd_ticket_wait(membership.get(), ticket, EPD_FOREVER, nullptr);
  round.rank_lost_us = kit::now_us() - begin;
  if (status != EPD_RANK_LOST) {
    kit::fail(std::string("the survivor's dispatch ended with ") + epd_status_name(status) +
              ", expected RANK_LOST");
  }
  const kit::SessionPtr again = kit::attach(socket, "host:1");
  round.reuse_us = kit::now_us() - begin;
  ::waitpid(victim, nullptr, 0);
  return round;
}

// Memory files that a process holds open; -1 if it can't be looked at.
int memory_files(pid_t pid) {
  std::error_code error;
  int count = 0;
  for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", error)) {
    std::error_code gone;
    if (fs::read_symlink(entry.path(), gone).string().find("/memfd:") != std::string::npos) ++count;
  }
  return error ? -1 : count;
}

// "" when the daemon holds at most `before` within five seconds, else what it holds.
std::string leak_of(pid_t daemon, int before) {
  int now = memory_files(daemon);
  for (int i = 0; i < 500 && now > before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    now = memory_files(daemon);
  }
  if (now <= before) return "";
  return "the daemon holds " + std::to_string(now) + " memory files, before: " + std::to_string(before);
}

void run_alone(const kit::OwnDaemon& daemon, const std::function<void()>& body) {
  kit::Team team(1);
  kit::Team::Options options;
  if (daemon.pid() > 0) options.daemons = {daemon.pid()};
  team.run([&body](kit::TeamRank&) { body(); }, options);
}

}  // namespace

Reports measure_attach(const kit::OwnDaemon& daemon, std::uint32_t rounds) {
  kit::SharedArray<double> attach_us(rounds);
  kit::SharedArray<double> detach_us(rounds);
  kit::SharedArray<char> name(64);
  run_alone(daemon, [&] {
    note_daemon(kit::attach(daemon.socket(), "host:0"), name);  // the daemon is up from here on
    for (std::uint32_t i = 0; i < rounds; ++i) {
      const double begin = kit::now_us();
      kit::SessionPtr session = kit::attach(daemon.socket(), "host:0");
      const double attached = kit::now_us();
      session.reset();
      attach_us[i] = attached - begin;
      detach_us[i] = kit::now_us() - attached;
    }
  });
  return {report_of("attach", attach_us, name), report_of("detach", detach_us, name)};
}

Reports measure_reap(const kit::OwnDaemon& daemon, std::uint32_t rounds) {
  kit::SharedArray<double> lost_us(rounds);
  kit::SharedArray<double> reuse_us(rounds);
  kit::SharedArray<char> name(64);
  const std::string prefix = "epbench-reap-" + std::to_string(::getpid()) + "-";
  run_alone(daemon, [&] { note_daemon(kit::attach(daemon.socket(), "host:0"), name); });
  const int before = daemon.pid() > 0 ? memory_files(daemon.pid()) : -1;
  for (std::uint32_t i = 0; i < rounds; ++i) {
    run_alone(daemon, [&] {
      const ReapRound round = reap_once(daemon.socket(), prefix + std::to_string(i), name);
      lost_us[i] = round.rank_lost_us;
      reuse_us[i] = round.reuse_us;
    });
  }
  Reports reports{report_of("rank_lost", lost_us, name), report_of("reuse", reuse_us, name)};
  const std::string leak = before >= 0 ? leak_of(daemon.pid(), before) : "";
  if (!leak.empty()) reports[0].update({{"correct", false}, {"problem", leak}});
  return reports;
}

std::string lifecycle_text(const Reports& reports) {
  const auto ms = [](const char* title, const char* field) {
    return Column{title, [=](const Json& r) { return format("%.3f", r.at(field).get<double>() / 1e3); }};
  };
  return table(reports, {column("", "op"), column("samples", "samples"), ms("p50 ms", "p50_us"),
                         ms("p90 ms", "p90_us"), ms("p99 ms", "p99_us"), ms("max ms", "max_us"),
                         column("problem", "problem")});
}

}  // namespace epd::bench
