// Operating a daemon: what epctl shows, that it answers under load, its log, drain, termination, and
// what an idle daemon costs.
#include "common/signal.h"
#include "support/cases.h"
#include "support/census.h"
#include "support/client.h"
#include "support/daemon.h"
#include "support/ranks.h"
#include "support/refused_call.h"
#include "support/script.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace epd::test {
namespace {

using nlohmann::json;

class Operate : public testing::Test {
 protected:
  void start(std::uint32_t devices = 2, std::vector<std::pair<std::string, std::string>> settings = {}) {
    DaemonOptions options;
    options.devices = devices;
    options.settings = std::move(settings);
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_ != nullptr && daemon_->running()) daemon_->stop();
  }
  // epctl --json COMMAND; a test failure and null if it fails or prints no JSON.
  json epctl(const std::string& command) {
    const CommandResult result = daemon_->epctl({"--json", command});
    EXPECT_EQ(result.exit_code, 0) << command << ": " << result.err;
    json parsed = json::parse(result.out, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << result.out;
    return parsed;
  }
  std::unique_ptr<Daemon> daemon_;
};

Case load_case(std::uint32_t num_ranks) {
  Case c;
  c.seed = 31;
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * 2;
  c.max_tokens = 256;
  c.hidden = 2048;
  c.topk = 4;
  c.depth = 4;
  c.sizes = Sizes::kFull;
  return c;
}

struct Stage {
  Gate joined;
  Gate stop;
  std::atomic<std::uint64_t> operations{0};
};

// Submits on every slot again and again, and never looks at the rows: as much load as the engines carry.
void saturate(const Daemon& daemon, Stage& stage, const Case& c, std::uint32_t rank) {
  const Session session(daemon.socket(), daemon.device(rank));
  const Group group(session, c.config("load", rank));
  for (std::uint32_t slot = 0; slot < c.depth; ++slot)
    fill_dispatch(c, group.buffers(slot), make_input(c, rank, slot));
  stage.joined.arrive();
  std::vector<epd_ticket_t> tickets(c.depth, 0);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.num_tokens = c.max_tokens;
  while (stage.stop.count == 0) {
    for (std::uint32_t slot = 0; slot < c.depth; ++slot) {
      if (tickets[slot] != 0 && group.wait(tickets[slot], 30000) != EPD_OK) return;  // a peer has stopped
      args.slot = slot;
      if (group.dispatch(&args, &tickets[slot], nullptr) != EPD_OK) return;
      stage.operations.fetch_add(1);
    }
  }
}

TEST_F(Operate, StatusAnswersWhileTheDataPlaneIsSaturated) {
  start(4);
  const Case c = load_case(4);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(4, [&](std::uint32_t rank) -> std::string {
    saturate(*daemon_, *stage, c, rank);
    return "";
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->joined.count == 4 && stage->operations > 50; }));
  std::vector<double> seconds;
  std::uint64_t last = 0;
  bool moved = false;
  for (int i = 0; i < 10; ++i) {
    const CommandResult result = daemon_->epctl({"--json", "status"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_LT(result.seconds, 5);
    seconds.push_back(result.seconds);
    const std::uint64_t done = json::parse(result.out)["devices"][0]["ops_completed"];
    moved = moved || (i > 0 && done > last);
    last = done;
  }
  EXPECT_TRUE(moved) << "the counters of a working engine stand still";
  const json groups = epctl("groups");
  ASSERT_EQ(groups["groups"].size(), 1u);
  EXPECT_EQ(groups["groups"][0]["name"], "load");
  EXPECT_EQ(groups["groups"][0]["state"], "active");
  EXPECT_EQ(groups["groups"][0]["members"].size(), 4u);
  stage->stop.open();
  expect_all_ok(wait_all(ranks, 60));
  std::sort(seconds.begin(), seconds.end());
  std::printf("epctl status beside %lu operations: median %.1f ms, longest %.1f ms, process start included\n",
              static_cast<unsigned long>(stage->operations.load()), seconds[5] * 1000, seconds.back() * 1000);
}

TEST_F(Operate, SessionsGroupsAndDevicesAreShown) {
  start(2);
  Shared<Stage> stage;
  RankProcess client([&]() -> std::string {
    const Session session(daemon_->socket(), "host:1");
    const Group group(session, small_config("shown", 0, 1));
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 1; }));
  const json sessions = epctl("sessions");
  ASSERT_EQ(sessions["sessions"].size(), 1u) << sessions;
  EXPECT_EQ(sessions["sessions"][0]["pid"], client.pid());
  EXPECT_EQ(sessions["sessions"][0]["uid"], ::getuid());
  EXPECT_EQ(sessions["sessions"][0]["device"], "host:1");
  EXPECT_TRUE(eventually(20, [&] { return epctl("status")["daemon"]["groups"] == 1; }))
      << "probes' groups go";
  const json status = epctl("status");
  EXPECT_EQ(status["daemon"]["pid"], daemon_->pid());
  EXPECT_EQ(status["daemon"]["state"], "serving");
  EXPECT_EQ(status["daemon"]["sessions"], 1);
  EXPECT_GT(status["daemon"]["arena_bytes"], 0);
  std::set<pid_t> shown;
  for (const json& device : status["devices"]) {
    EXPECT_EQ(device["state"], "ready");
    shown.insert(device["engine_pid"].get<pid_t>());
  }
  const std::vector<pid_t> engines = daemon_->engines();
  EXPECT_EQ(shown, std::set<pid_t>(engines.begin(), engines.end()));
  stage->stop.open();
  const RankOutcome outcome = client.wait(30);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  EXPECT_TRUE(eventually(20, [&] { return epctl("sessions")["sessions"].empty(); }));
  EXPECT_TRUE(eventually(20, [&] { return epctl("status")["daemon"]["arena_bytes"] == 0; }));
}

TEST_F(Operate, DoctorFindsAHealthyDaemonHealthy) {
  start(2);
  const json doctor = epctl("doctor");
  EXPECT_GT(doctor["checks"].size(), 5u);
  for (const json& check : doctor["checks"]) EXPECT_NE(check["level"], "fail") << check;
}

TEST_F(Operate, AnEngineThatWasRestartedIsShown) {
  start(2);
  const pid_t before = daemon_->engine(0);
  ASSERT_GT(before, 0);
  send_signal(before, SIGKILL);
  json device;
  EXPECT_TRUE(eventually(20, [&] {
    device = epctl("devices")["devices"][0];
    return device["state"] == "ready" && device["restarts"] == 1;
  })) << device;
  EXPECT_NE(device["engine_pid"], before);
  EXPECT_EQ(device["last_exit"], "signal 9");
  EXPECT_NE(daemon_->log().find("perhaps by the kernel's OOM killer"), std::string::npos) << daemon_->log();
}

// They were counted when they ended: the rank that held up all others had the shortest.
TEST_F(Operate, WaitsInProgressWereNotCounted) {
  start(2);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    const Group group(session, small_config("slow", rank, 2));
    epd_ticket_t ticket = 0;
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    if (rank == 0) must(group.dispatch(&args, &ticket, nullptr), "dispatch");
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(20, [&] { return stage->joined.count == 2; }));
  json waits;
  EXPECT_TRUE(eventually(20, [&] {
    waits = json::parse(daemon_->epctl({"--json", "waits", "slow"}).out)["groups"][0];
    return waits["ranks"][1]["waited_for_ready_us"] > 300'000;
  })) << waits;
  EXPECT_GT(waits["ranks"][0]["waited_us"], 300'000);
  ASSERT_EQ(waits["pairs"].size(), 1u) << waits;
  EXPECT_EQ(waits["pairs"][0]["rank"], 0);
  EXPECT_EQ(waits["pairs"][0]["peer"], 1);
  EXPECT_GT(waits["pairs"][0]["ready_us"], 300'000);
  stage->stop.open();
  expect_all_ok(wait_all(ranks, 20));
}

// Members of this one are all on one device, so that no engine was told of the break.
TEST_F(Operate, ABreakByAnEnginesDeathWasNoEvent) {
  start(1);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(0));
    const Group group(session, small_config("one", rank, 2));
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(20, [&] { return stage->joined.count == 2; }));
  const auto breaks = [&] {
    std::vector<json> found;
    std::istringstream lines(daemon_->epctl({"--json", "events"}).out);
    for (std::string line; std::getline(lines, line);) {
      const json event = json::parse(line);
      if (event["kind"] == "group_broke") found.push_back(event);
    }
    return found;
  };
  const auto serves = [&](std::uint64_t epoch) {
    return eventually(20, [&] {
      const json group = epctl("groups")["groups"][0];
      return group["state"] == "active" && group["epoch"] == epoch;
    });
  };
  send_signal(daemon_->engine(0), SIGKILL);
  ASSERT_TRUE(serves(2));
  ASSERT_EQ(breaks().size(), 1u);
  EXPECT_EQ(breaks()[0]["fields"]["cause"], "ENGINE_RESTARTED") << breaks()[0];
  EXPECT_EQ(breaks()[0]["level"], "warning");
  EXPECT_EQ(daemon_->epctl({"restart", "device", "host:0"}).exit_code, 0);
  ASSERT_TRUE(serves(3));
  ASSERT_EQ(breaks().size(), 2u);
  EXPECT_EQ(breaks()[1]["level"], "info") << "what an operator wants is no fault";
  stage->stop.open();
  expect_all_ok(wait_all(ranks, 20));
}

// It was an error, counted by the alert, and doctor warned of it.
TEST_F(Operate, AnOperatorsRestartWasTakenForADeath) {
  start(2);
  const pid_t before = daemon_->engine(0);
  EXPECT_EQ(daemon_->epctl({"restart", "device", "host:0"}).exit_code, 0);
  json device;
  ASSERT_TRUE(eventually(20, [&] {
    device = epctl("devices")["devices"][0];
    return device["state"] == "ready" && device["engine_pid"] != before;
  })) << device;
  EXPECT_EQ(device["restarts"], 0);
  EXPECT_EQ(device["last_exit"], "");
  const json checks = epctl("doctor")["checks"];
  const auto check = std::find_if(checks.begin(), checks.end(),
                                  [](const json& one) { return one["name"] == "device host:0"; });
  ASSERT_NE(check, checks.end()) << checks;
  EXPECT_EQ((*check)["level"], "ok") << *check;
  const std::string events = daemon_->epctl({"events"}).out;
  EXPECT_NE(events.find("device restarted by the operator"), std::string::npos) << events;
  EXPECT_NE(events.find("engine ended"), std::string::npos) << events;
  for (const char* word : {"engine died", "engine killed", "error: "})
    EXPECT_EQ(events.find(word), std::string::npos) << events;
}

// It was shown as ready for as long as it lasted.
TEST_F(Operate, AStoppedEngineIsShownAsStopped) {
  start(2);
  const pid_t engine = daemon_->engine(1);
  send_signal(engine, SIGSTOP);
  json device;
  EXPECT_TRUE(eventually(20, [&] {
    device = epctl("devices")["devices"][1];
    return device["state"] == "stopped";
  })) << device;
  EXPECT_EQ(epctl("status")["devices"][1]["state"], "stopped");
  EXPECT_EQ(epctl("status")["devices"][0]["state"], "ready");
  const CommandResult doctor = daemon_->epctl({"doctor"});
  EXPECT_EQ(doctor.exit_code, 4) << doctor.out;
  EXPECT_NE(doctor.out.find("stopped: its engine stands still"), std::string::npos) << doctor.out;
  EXPECT_TRUE(eventually(20, [&] { return daemon_->log().find("engine is stopped") != std::string::npos; }));
  send_signal(engine, SIGCONT);
  EXPECT_TRUE(eventually(20, [&] { return daemon_->log().find("engine continues") != std::string::npos; }));
  EXPECT_TRUE(eventually(20, [&] { return epctl("devices")["devices"][1]["state"] == "ready"; }));
  EXPECT_EQ(daemon_->engine(1), engine);
}

// It came back only with the whole daemon.
TEST_F(Operate, AFailedDeviceIsStartedAgainAndTakesSessions) {
  start(2, {{"engine.max_restarts_per_minute", "1"}});
  const auto state = [&] { return epctl("devices")["devices"][0]["state"].get<std::string>(); };
  for (int restarts = 0; restarts < 2; ++restarts) {
    ASSERT_TRUE(eventually(20, [&] {
      const json device = epctl("devices")["devices"][0];
      return device["state"] == "ready" && device["restarts"] == restarts;
    }));
    send_signal(daemon_->engine(0), SIGKILL);
  }
  ASSERT_TRUE(eventually(20, [&] { return state() == "failed"; }));
  const CommandResult doctor = daemon_->epctl({"doctor"});
  EXPECT_NE(doctor.out.find("epctl restart device host:0"), std::string::npos) << doctor.out;
  const auto serves = [&] {
    expect_all_ok(run_ranks(2, 60, [&](std::uint32_t rank) -> std::string {
      const Session session(daemon_->socket(), daemon_->device(rank));
      const Group group(session, small_config("again", rank, 2));
      return "";
    }));
  };
  const CommandResult restart = daemon_->epctl({"restart", "device", "host:0"});
  EXPECT_EQ(restart.exit_code, 0) << restart.err;
  ASSERT_TRUE(eventually(20, [&] { return state() == "ready"; }));
  serves();
  const pid_t before = daemon_->engine(0);
  EXPECT_EQ(daemon_->epctl({"restart", "device", "host:0"}).exit_code, 0) << "one that runs, too";
  EXPECT_TRUE(eventually(20, [&] { return state() == "ready" && daemon_->engine(0) != before; }));
  serves();
  const CommandResult unknown = daemon_->epctl({"restart", "device", "host:9"});
  EXPECT_EQ(unknown.exit_code, 1);
  EXPECT_NE(unknown.err.find("allowed: host:0, host:1"), std::string::npos) << unknown.err;
  EXPECT_EQ(daemon_->log().find("level=warning process=\"epd\" event=\"group breaks\""), std::string::npos)
      << "programs that end as they should are no warnings";
  EXPECT_TRUE(eventually(20, [&] {
    const std::string log = daemon_->log();
    return log.find("event=\"group ends\"") != std::string::npos &&
           log.find("event=\"rank left\"") != std::string::npos;
  }));
  EXPECT_EQ(daemon_->log().find("event=\"rank lost\""), std::string::npos) << "they lose nobody";
}

// ---- the log -----------------------------------------------------------------------------------

TEST_F(Operate, TheLogSaysMoreOfTheRoomThatIsAskedFor) {
  start(1);
  const auto attach = [this] {
    expect_all_ok(run_ranks(1, 30, [&](std::uint32_t) -> std::string {
      const Session session(daemon_->socket(), "host:0");
      const Group group(session, small_config("talks", 0, 1));
      return "";
    }));
  };
  const auto lines_of_level = [this](const std::string& level) {
    const std::string log = daemon_->log();
    std::size_t count = 0;
    for (std::size_t at = 0; (at = log.find("level=" + level, at)) != std::string::npos; ++at) ++count;
    return count;
  };
  attach();
  EXPECT_EQ(lines_of_level("debug"), 0u);
  EXPECT_EQ(daemon_->epctl({"set", "log", "level=info,supervisor=debug"}).exit_code, 0);
  attach();
  EXPECT_TRUE(eventually(20, [&] { return lines_of_level("debug") != 0; })) << daemon_->log();
  EXPECT_EQ(daemon_->epctl({"set", "log", "level=error"}).exit_code, 0);
  std::size_t before = 0;
  EXPECT_TRUE(eventually(20, [&] {  // lines that were said before may come later
    before = lines_of_level("info");
    sleep_ms(300);
    return lines_of_level("info") == before;
  }));
  attach();
  EXPECT_EQ(lines_of_level("info"), before);
  EXPECT_EQ(daemon_->epctl({"set", "log", "level=unset"}).exit_code, 0);
  attach();
  EXPECT_TRUE(eventually(20, [&] { return lines_of_level("info") > before; }));
  const CommandResult bad = daemon_->epctl({"set", "log", "level=info,kitchen=debug"});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_NE(bad.err.find("info,kitchen=debug"), std::string::npos) << bad.err;
  EXPECT_NE(bad.err.find("supervisor"), std::string::npos) << bad.err;
}

std::vector<std::string> lines_with(const std::string& log, const std::string& piece) {
  std::vector<std::string> found;
  std::istringstream in(log);
  for (std::string line; std::getline(in, line);) {
    if (line.find(piece) != std::string::npos) found.push_back(line);
  }
  return found;
}

// Otherwise an alert on warnings would fire at each program's end.
TEST_F(Operate, WhoEndsAsItShouldIsNoWarning) {
  start(2);
  const Case c = load_case(2);
  ScriptOptions script;
  script.rounds = 2;
  expect_all_ok(run_ranks(2, 60, [&](std::uint32_t rank) -> std::string {
    return run_case(daemon_->socket(), daemon_->device(rank), "orderly", c, rank, script);
  }));
  daemon_->stop();
  for (const char* level : {"level=warning", "level=error", "operation failed"})
    EXPECT_TRUE(lines_with(daemon_->log(), level).empty()) << daemon_->log();
}

TEST_F(Operate, ADeathIsAWarningAndEachFailedOperationHasALine) {
  start(2);
  Shared<Gate> waits;
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      const Session session(daemon_->socket(), daemon_->device(rank));
      const Group group(session, small_config("mourned", rank, 2));
      epd_dispatch_args_t args;
      epd_dispatch_args_init(&args);
      epd_ticket_t ticket = 0;
      if (rank == 0) must(group.dispatch(&args, &ticket, nullptr), "dispatch");
      waits->arrive();
      if (rank == 1) ::pause();
      must(group.wait(ticket, 30000), "dispatch", EPD_RANK_LOST);
      return "";
    });
  }
  ASSERT_TRUE(eventually(30, [&] { return waits->count == 2; }));
  ranks[1].kill(SIGKILL);
  EXPECT_TRUE(ranks[0].wait(30).ok);
  // Each process writes its lines by a thread of its own.
  const auto has = [&](const std::string& event) {
    const auto lines = lines_with(daemon_->log(), "event=\"" + event + "\"");
    return std::any_of(lines.begin(), lines.end(), [](const std::string& line) {
      return line.find(" name=\"mourned\"") != std::string::npos;
    });
  };
  ASSERT_TRUE(eventually(20, [&] {
    return lines_with(daemon_->log(), "how=\"died\"").size() >= 2 && has("rank joined") && has("rank lost") &&
           has("group breaks") && has("operation failed");
  })) << daemon_->log();
  const auto failed = lines_with(daemon_->log(), "event=\"operation failed\"");
  ASSERT_EQ(failed.size(), 1u);
  for (const char* part :
       {"level=warning", "process=\"engine host:0\"", "name=\"mourned\"", "rank=0", "op=\"dispatch\"",
        "index=0", "status=\"RANK_LOST\"", "failed_rank=1", "cause=\"rank 1"}) {
    EXPECT_NE(failed[0].find(part), std::string::npos) << part << " is not in " << failed[0];
  }
  const auto deaths = lines_with(daemon_->log(), "how=\"died\"");
  ASSERT_EQ(deaths.size(), 2u) << "of the session and of the rank";
  for (const std::string& line : deaths) EXPECT_NE(line.find("level=warning"), std::string::npos) << line;
}

TEST(Programs, EpdAloneStartsNoDaemon) {
  const CommandResult alone = run_command({daemon_program()});
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_NE(alone.err.find("allowed: serve"), std::string::npos) << alone.err;
  const CommandResult empty = run_command({daemon_program(), "serve", "--config", ""});
  EXPECT_EQ(empty.exit_code, 2);
  EXPECT_NE(empty.err.find("is empty; allowed: a path"), std::string::npos) << empty.err;
  const CommandResult extra = run_command({daemon_program(), "serve", "extra"});
  EXPECT_EQ(extra.exit_code, 2);
  EXPECT_NE(extra.err.find("\"extra\" is not understood; allowed: "), std::string::npos) << extra.err;
  const CommandResult version = run_command({daemon_program(), "--version"});
  EXPECT_EQ(version.out.find("epd 0.1.0"), 0u) << version.out;
  EXPECT_NE(version.out.find("\ncommit "), std::string::npos) << version.out;
  EXPECT_EQ(run_command({epctl_program(), "-V"}).out, "epctl" + version.out.substr(3));
  const CommandResult help = run_command({daemon_program(), "serve", "--help"});
  EXPECT_NE(help.out.find("--devices.cuda"), std::string::npos)
      << "epd serve --help showed only -h: " << help.out;
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_EQ(run_command({daemon_program(), "engine", "--help"}).out.find("SIGTERM"), std::string::npos);
}

// It said that it serves, and then failed its devices for good, or answered nobody.
TEST(Programs, EpdEndsWhereASystemCallIsRefused) {
  const std::string directory = testing::TempDir() + "epd-refused-" + std::to_string(::getpid());
  const std::pair<long, std::string> calls[] = {{SYS_pidfd_open, "pidfd_open"}, {SYS_accept4, "accept4"}};
  for (const auto& [call, name] : calls) {
    RankProcess sandbox([&, number = call, text = name]() -> std::string {
      RANK_CHECK(refuse_call(number, EPERM), "no filter can be set");
      const CommandResult result =
          run_command({daemon_program(), "serve", "--config", "/dev/null", "--devices.cuda", "none",
                       "--socket", directory + "/a.sock", "--control-socket", directory + "/c.sock"},
                      10);
      RANK_CHECK(result.exit_code == 1, std::to_string(result.exit_code) + ": " + result.err);
      RANK_CHECK(result.err.find(text + " is refused: ") != std::string::npos, result.err);
      return "";
    });
    const RankOutcome outcome = sandbox.wait(30);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
  }
}

TEST_F(Operate, TheFirstLineTellsWhatRunsHere) {
  start(2);
  const std::string log = daemon_->log();
  const std::string first = log.substr(0, log.find('\n'));
  for (const char* part :
       {"event=\"epd starts\"", "version=\"0.1.0", "commit=\"", "config=\"/", "devices=\"host:0, host:1\""}) {
    EXPECT_NE(first.find(part), std::string::npos) << part << " is not in " << first;
  }
  EXPECT_EQ(first.find("commit=\"\""), std::string::npos) << first;
  const json version = epctl("version");
  EXPECT_EQ(version["daemon"]["commit"], version["client"]["commit"]);
  EXPECT_NE(first.find(version["daemon"]["commit"].get<std::string>()), std::string::npos) << first;
}

TEST_F(Operate, HealthIsAnExitStatus) {
  start(2);
  EXPECT_EQ(daemon_->epctl({"health"}).exit_code, 0);
  EXPECT_EQ(daemon_->epctl({"health", "device/host:1"}).exit_code, 0);
  const CommandResult unknown = daemon_->epctl({"health", "device/host:9"});
  EXPECT_EQ(unknown.exit_code, 1);
  send_signal(daemon_->engine(1), SIGSTOP);
  EXPECT_TRUE(eventually(20, [&] { return daemon_->epctl({"health", "device/host:1"}).exit_code == 4; }));
  EXPECT_EQ(daemon_->epctl({"health"}).exit_code, 0) << "the daemon serves all the same";
  EXPECT_EQ(daemon_->epctl({"health", "cluster"}).exit_code, 1) << "there is none";
  send_signal(daemon_->engine(1), SIGCONT);
  EXPECT_TRUE(eventually(20, [&] { return daemon_->epctl({"health", "device/host:1"}).exit_code == 0; }));
}

// Operations are in flight, in chunks that several threads share, when the number of threads changes.
TEST_F(Operate, SmsChangeWhileOperationsRun) {
  start(2);
  Case c = load_case(4);
  c.hidden = 4096;
  ScriptOptions script;
  script.rounds = 40;
  Shared<Stage> stage;
  script.on_complete = [&stage](std::uint64_t) { stage->operations.fetch_add(1); };
  std::vector<RankProcess> ranks = start_ranks(4, [&](std::uint32_t rank) -> std::string {
    return run_case(daemon_->socket(), daemon_->device(rank), "sms", c, rank, script);
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->operations > 0; }));
  for (const std::uint32_t sms : {1u, 4u, 3u, 1u, 2u}) {
    const std::uint64_t before = stage->operations;
    daemon_->rewrite_sms(sms);
    daemon_->signal(SIGHUP);
    EXPECT_TRUE(eventually(20, [&] {
      const json devices = epctl("devices");
      return devices["devices"][0]["sms"] == sms && devices["devices"][1]["sms"] == sms;
    })) << sms;
    const std::uint64_t all = std::uint64_t{8} * script.rounds;
    EXPECT_TRUE(eventually(60, [&] { return stage->operations > before || stage->operations == all; }))
        << sms;
  }
  expect_all_ok(wait_all(ranks, 120));
}

// ---- the end -----------------------------------------------------------------------------------

TEST_F(Operate, ASecondDrainMayShortenTheFirst) {
  start(2);
  RankProcess client([this]() -> std::string {
    const Session session(daemon_->socket(), daemon_->device(0));
    sleep_ms(60'000);
    return "";
  });
  ASSERT_TRUE(eventually(10, [&] { return epctl("sessions")["sessions"].size() == 1; }));
  const CommandResult first = daemon_->epctl({"drain", "--timeout-ms", "600000"});
  EXPECT_TRUE(first.out.find("within 10 m 0 s") != std::string::npos) << first.out;
  const CommandResult later = daemon_->epctl({"drain", "--timeout-ms", "900000"});
  EXPECT_TRUE(later.out.find("within 10 m 0 s") != std::string::npos ||
              later.out.find("within 9 m 5") != std::string::npos)
      << "what is left of the first: " << later.out;
  const CommandResult second = daemon_->epctl({"drain", "--timeout-ms", "300", "--wait"});
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_TRUE(second.out.find("the daemon has gone") != std::string::npos) << second.out;
  client.kill(SIGKILL);
}

TEST_F(Operate, DrainRefusesNewSessionsAndWaitsForTheOld) {
  start(2, {{"timeouts.drain_ms", "20000"}});
  Shared<Stage> stage;
  RankProcess client([&]() -> std::string {
    const Session session(daemon_->socket(), "host:0");
    const Group group(session, small_config("drained", 0, 1));
    stage->joined.arrive();
    stage->stop.wait_for(1);
    epd_attach_options_t options;
    epd_attach_options_init(&options);
    options.socket_path = daemon_->socket().c_str();
    epd_session_t* other = nullptr;
    RANK_CHECK(epd_session_attach(&options, &other) != EPD_OK, "a draining daemon admits nobody");
    epd_ticket_t ticket = 0;  // and still serves those it has
    must(epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket), "noop");
    must(group.wait(ticket, 10000), "noop");
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 1; }));
  const CommandResult drain = daemon_->epctl({"drain"});
  EXPECT_EQ(drain.exit_code, 0) << drain.err;
  EXPECT_TRUE(drain.out.find("1 session may finish within") != std::string::npos) << drain.out;
  const auto daemon = epctl("status")["daemon"];
  EXPECT_EQ(daemon["state"], "draining");
  const auto left = daemon["drain_left_ms"].get<std::uint64_t>();
  EXPECT_TRUE(left > 0 && left <= 20'000) << left;
  stage->stop.open();
  const RankOutcome outcome = client.wait(30);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  const int status = daemon_->wait_exit(10);
  EXPECT_TRUE(status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// How a fleet is updated: a second daemon of the node takes new sessions.
TEST_F(Operate, ClientsMoveToADaemonBesideTheOneThatDrains) {
  start(1);
  DaemonOptions options;
  options.devices = 1;
  Daemon next(std::move(options));
  ASSERT_TRUE(next.start());
  const std::string both = daemon_->socket() + ":" + next.socket();
  const auto client = [&]() -> std::string {
    const Session session(both, "host:0");
    const Group group(session, small_config("moves", 0, 1));
    epd_ticket_t ticket = 0;
    must(epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket), "noop");
    must(group.wait(ticket, 10000), "noop");
    sleep_ms(60'000);
    return "";
  };
  RankProcess stays(client);
  ASSERT_TRUE(eventually(10, [&] { return epctl("groups")["groups"].size() == 1; }));
  EXPECT_EQ(daemon_->epctl({"drain", "--timeout-ms", "600000"}).exit_code, 0);
  RankProcess moves(client);
  EXPECT_TRUE(eventually(10, [&] {
    return json::parse(next.epctl({"--json", "groups"}).out)["groups"].size() == 1;
  }));
  EXPECT_EQ(epctl("groups")["groups"].size(), 1u);
  stays.kill(SIGKILL);
  EXPECT_EQ(daemon_->wait_exit(10), 0) << "nobody is left";
  moves.kill(SIGKILL);
  ASSERT_TRUE(eventually(10, [&] { return next.serves_nobody(); }));
  next.stop();
}

// The signal was ignored without a word.
TEST_F(Operate, AReloadWhileItDrainsIsRefusedInTheLog) {
  start(1);
  RankProcess client([this]() -> std::string {
    const Session session(daemon_->socket(), daemon_->device(0));
    sleep_ms(60'000);
    return "";
  });
  ASSERT_TRUE(eventually(10, [&] { return epctl("sessions")["sessions"].size() == 1; }));
  EXPECT_EQ(daemon_->epctl({"drain", "--timeout-ms", "600000"}).exit_code, 0);
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(eventually(20, [&] {
    const auto refused = lines_with(daemon_->log(), "event=\"configuration not reloaded\"");
    return refused.size() == 1 && refused[0].find("the daemon is draining") != std::string::npos;
  })) << daemon_->log();
  const CommandResult reload = daemon_->epctl({"reload"});
  EXPECT_EQ(reload.exit_code, 1);
  EXPECT_NE(reload.err.find("ABORTED: the daemon is draining"), std::string::npos) << reload.err;
  // It said that no engine is started again, and started those that died.
  const CommandResult restart = daemon_->epctl({"restart", "device", daemon_->device(0)});
  EXPECT_EQ(restart.exit_code, 1);
  EXPECT_NE(restart.err.find("an engine that dies is started again"), std::string::npos) << restart.err;
  client.kill(SIGKILL);
}

TEST_F(Operate, TerminationEndsSessionsThatStay) {
  start(2, {{"timeouts.drain_ms", "300"}});
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    const Group group(session, small_config("terminated", rank, 2));
    epd_ticket_t ticket = 0;
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.timeout_ms = 60000;
    if (rank == 0) must(group.dispatch(&args, &ticket, nullptr), "dispatch");  // waits for rank 1
    stage->joined.arrive();
    const auto ended = [](epd_status_t status) { return status == EPD_DAEMON_LOST; };
    if (rank == 0) {
      const epd_status_t status = group.wait(ticket, 20000);
      RANK_CHECK(ended(status), std::string(epd_status_name(status)) + ": " + epd_last_error());
    }
    RANK_CHECK(eventually(20, [&] { return ended(epd_session_check(session.get())); }), "the session ends");
    return epd_last_error();
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 2; }));
  daemon_->stop();
  expect_all_ok(wait_all(ranks, 30));
}

TEST_F(Operate, InterruptEndsItToo) {
  start(1);
  daemon_->signal(SIGINT);
  const int status = daemon_->wait_exit(20);
  EXPECT_TRUE(status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(Operate, IdleCostsNextToNothing) {
  start(4);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(4, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    const Case c = load_case(4);
    const Group group(session, c.config("idle", rank));
    ScriptOptions options;
    options.rounds = 2;
    ScriptRunner(group, c, rank, options).run();
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->joined.count == 4; }));
  sleep_ms(500);
  const std::vector<pid_t> pids = daemon_->all_pids();
  ASSERT_EQ(pids.size(), 5u);
  const auto total_cpu = [&] {
    std::uint64_t total = 0;
    for (const pid_t pid : pids) total += cpu_ms(pid);
    return total;
  };
  const std::uint64_t before = total_cpu();
  const double start_s = now_s();
  sleep_ms(3000);
  const double percent = static_cast<double>(total_cpu() - before) / (now_s() - start_s) / 10;
  std::printf("idle, 4 sessions in a group: %.2f %% of a core in all processes together (aim: 1 %%)\n",
              percent);
  EXPECT_LT(percent, 5);
  for (const pid_t pid : pids) {
    const Census census = take_census(pid);
    std::printf("%s %d: %.1f MB resident of its own, %.1f MB shared\n",
                pid == daemon_->pid() ? "supervisor" : "engine", pid,
                static_cast<double>(census.own_kib) / 1024, static_cast<double>(census.shared_kib) / 1024);
    EXPECT_LT(census.own_kib, 60u * 1024);
  }
  stage->stop.open();
  expect_all_ok(wait_all(ranks, 30));
}

}  // namespace
}  // namespace epd::test
