// The operator's tools against a real daemon: stuck operations explain themselves, statistics, live settings.
#include "common/signal.h"
#include "operator_fixture.h"
#include "support/cases.h"
#include "support/rank_bodies.h"
#include "support/script.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <future>
#include <string>
#include <vector>

namespace epd::test {
namespace {

// ---- epctl op

// Two ranks; rank 0 submits and waits, rank 1 does so when the test says.
class Stuck : public Operator {
 protected:
  void start_ranks() {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ranks_.emplace_back([this, rank]() -> std::string {
        const Session session(daemon_->socket(), daemon_->device(rank));
        const Group group(session, small_config("stuck", rank, 2));
        stage_->joined.arrive();
        if (rank == 1) stage_->go.wait_for(1);
        epd_ticket_t ticket = 0;
        epd_dispatch_args_t args;
        epd_dispatch_args_init(&args);
        args.timeout_ms = 60000;
        must(group.dispatch(&args, &ticket, nullptr), "dispatch");
        must(group.wait(ticket, 60000), "dispatch");
        stage_->stop.meet(2);
        return "";
      });
    }
    ASSERT_TRUE(eventually(30, [&] { return stage_->joined.count == 2; }));
    ASSERT_TRUE(eventually(30, [&] {
      detail_ = the_operation();
      return !detail_.is_null() && !detail_["waits"].empty();
    })) << detail_;
  }
  bool text_becomes(const std::string& part) {
    return eventually(20, [&] {
      detail_ = the_operation();
      return !detail_.is_null() && detail_["text"].get<std::string>().find(part) != std::string::npos;
    });
  }
  void finish() {
    stage_->go.open();
    expect_all_ok(wait_all(ranks_, 60));
  }

  Shared<Stage> stage_;
  std::vector<RankProcess> ranks_;
  json detail_;
};

TEST_F(Stuck, APeerThatHasNotSubmittedIsNamed) {
  start();
  start_ranks();
  const json& wait = detail_["waits"][0];
  EXPECT_EQ(wait["rank"], 1);
  EXPECT_EQ(wait["pid"], ranks_[1].pid());
  EXPECT_EQ(wait["device"], "host:1");
  EXPECT_EQ(wait["submitted"], false);
  EXPECT_EQ(wait["client_stopped"], false);
  EXPECT_EQ(wait["engine_stopped"], false);
  EXPECT_EQ(detail_["pid"], ranks_[0].pid());
  EXPECT_EQ(detail_["group"], "stuck");
  const json& operation = detail_["operation"];
  EXPECT_EQ(operation["stage"], "wait_ready");
  EXPECT_GT(operation["deadline_in_us"].get<std::int64_t>(), 20'000'000);
  EXPECT_LE(operation["deadline_in_us"].get<std::int64_t>(), 60'000'000);
  std::vector<std::string> stages;
  for (const json& stage : operation["stages"]) stages.push_back(stage["stage"]);
  EXPECT_EQ(stages, (std::vector<std::string>{"seen", "planning", "wait_ready"}));
  const std::uint64_t waited = operation["waiting_us"];
  sleep_ms(50);
  EXPECT_GE(the_operation()["operation"]["waiting_us"].get<std::uint64_t>(), waited + 50'000) << "since then";
  EXPECT_NE(detail_["text"].get<std::string>().find("has not submitted it"), std::string::npos) << detail_;

  ranks_[1].kill(SIGSTOP);
  EXPECT_TRUE(text_becomes("has not submitted it; its process is stopped by a signal")) << detail_;
  EXPECT_EQ(detail_["waits"][0]["client_stopped"], true);
  const json watch = lines({"watch", "--interval", "0.1", "--count", "1"}).at(0);
  EXPECT_EQ(watch["slowest"]["waits"][0]["client_stopped"], true) << watch;
  ranks_[1].kill(SIGCONT);
  finish();
  EXPECT_EQ(daemon_->epctl({"op", detail_["operation"]["id"]}).exit_code, 1) << "it has ended";
}

TEST_F(Stuck, AStoppedEngineIsNamedAndNotItsClient) {
  start();
  start_ranks();
  const pid_t engine = daemon_->engine(1);
  send_signal(engine, SIGSTOP);
  EXPECT_TRUE(text_becomes("the engine of host:1 (pid " + std::to_string(engine) + ") does not respond"))
      << detail_;
  EXPECT_EQ(detail_["waits"][0]["engine_stopped"], true);
  EXPECT_EQ(detail_["waits"][0]["client_stopped"], false);
  send_signal(engine, SIGCONT);
  send_signal(daemon_->engine(0), SIGSTOP);
  EXPECT_TRUE(text_becomes("its own engine")) << detail_;
  EXPECT_EQ(detail_["engine_stopped"], true);
  send_signal(daemon_->engine(0), SIGCONT);
  EXPECT_TRUE(text_becomes("has not submitted it")) << detail_;
  finish();
}

// The wait that it showed last would continue for ever.
TEST_F(Stuck, AnOperationOfAStoppedEngineShowsNoWait) {
  start();
  start_ranks();
  json operation = detail_["operation"];
  EXPECT_EQ(operation["waiting_for"], 1);
  EXPECT_EQ(operation["engine_stopped"], false);
  const pid_t engine = daemon_->engine(0);
  send_signal(engine, SIGSTOP);
  const auto shown = [&] {
    operation = epctl({"ops"})["operations"].at(0);
    return operation["engine_stopped"] == true;
  };
  EXPECT_TRUE(eventually(20, shown)) << operation;
  EXPECT_EQ(operation["waiting_for"], -1);
  EXPECT_EQ(operation["waiting_us"], 0);
  EXPECT_EQ(operation["stage"], "wait_ready") << "as it was";
  EXPECT_NE(daemon_->epctl({"ops"}).out.find("its engine stands still"), std::string::npos);
  send_signal(engine, SIGCONT);
  EXPECT_TRUE(eventually(20, [&] { return !shown() && operation["waiting_for"] == 1; })) << operation;
  finish();
}

// ---- statistics, settings

TEST_F(Operator, SettingsChangeUnderLoadAndCountersTellAllOfIt) {
  start();
  Case c;
  c.seed = 47;
  c.num_ranks = 4;
  c.num_experts = 8;
  c.max_tokens = 128;
  c.hidden = 2048;
  c.topk = 4;
  c.depth = 4;
  c.sizes = Sizes::kFull;
  ScriptOptions script;
  script.rounds = 24;
  Shared<Stage> stage;
  script.on_complete = [&stage](std::uint64_t) { stage->operations.fetch_add(1); };
  std::vector<RankProcess> ranks =
      start_group(*daemon_, c, "live", [&](const Group& group, std::uint32_t rank) -> std::string {
        ScriptRunner(group, c, rank, script).run();
        stage->joined.arrive();
        stage->stop.wait_for(1);
        return "";
      });
  ASSERT_TRUE(eventually(60, [&] { return stage->operations > 0; }));
  const std::vector<std::vector<std::string>> changes = {
      {"device", "host:0", "sms=1"},    {"group", "live", "sms=2", "priority=5"},
      {"device", "host:1", "sms=4"},    {"group", "live", "sms=0"},
      {"group", "live", "priority=-8"}, {"device", "host:0", "sms=3"},
      {"group", "live", "linger_us=0"}};
  for (std::vector<std::string> change : changes) {
    change.insert(change.begin(), "set");
    epctl(change);
  }
  EXPECT_TRUE(eventually(20, [&] {
    const json devices = epctl({"devices"})["devices"];
    return devices[0]["sms"] == 3 && devices[1]["sms"] == 4;
  }));
  const json group = epctl({"groups"})["groups"][0];
  EXPECT_EQ(group["sms"], 0);
  EXPECT_EQ(group["priority"], -8);
  const json frame = lines({"watch", "--interval", "0.3", "--count", "1"}).at(0);
  EXPECT_EQ(frame["devices"].size(), 2u);
  EXPECT_EQ(frame["sessions"].size(), 4u);
  EXPECT_EQ(frame["groups"][0]["name"], "live");
  ASSERT_TRUE(eventually(120, [&] { return stage->joined.count == 4; })) << "every result was checked";

  const json statistics = epctl({"stats"});
  ASSERT_EQ(statistics["groups"].size(), 1u);
  ASSERT_EQ(statistics["ranks"].size(), 4u);
  ASSERT_EQ(statistics["sessions"].size(), 4u);
  const json& sum = statistics["groups"][0]["statistics"];
  EXPECT_EQ(sum["dispatches"], 4 * script.rounds);
  EXPECT_EQ(sum["combines"], 4 * script.rounds);
  EXPECT_EQ(sum["completed"], 8 * script.rounds) << "no operation was lost";
  EXPECT_EQ(sum["failed"].size(), 0u);
  EXPECT_EQ(sum["done"]["count"], 8 * script.rounds);
  EXPECT_GT(sum["done"]["p99_us"].get<std::uint64_t>(), 0u);
  EXPECT_GT(sum["bytes_dispatched"].get<std::uint64_t>(), 0u);
  std::uint64_t of_devices = 0;
  const json devices = epctl({"devices"})["devices"];
  for (const json& device : devices) of_devices += device["bytes_dispatched"].get<std::uint64_t>();
  EXPECT_EQ(sum["bytes_dispatched"], of_devices);

  // One rank was the last of each operation; a rank with rows has waited for them.
  const json waits = epctl({"waits", "live"})["groups"];
  ASSERT_EQ(waits.size(), 1u);
  ASSERT_EQ(waits[0]["ranks"].size(), 4u);
  std::uint64_t last_arrivals = 0;
  std::uint64_t rows = 0;
  for (const json& rank : waits[0]["ranks"]) {
    EXPECT_EQ(rank["operations"], 2 * script.rounds) << rank;
    last_arrivals += rank["last_arrivals"].get<std::uint64_t>();
    rows += rank["rows"].get<std::uint64_t>();
  }
  EXPECT_EQ(last_arrivals, 2 * script.rounds);
  EXPECT_EQ(rows * c.hidden * 2, sum["bytes_dispatched"].get<std::uint64_t>()) << "bf16";
  EXPECT_GT(waits[0]["pairs"].size(), 0u);
  // All of that is the group's, not the engine's.
  send_signal(daemon_->engine(0), SIGKILL);
  EXPECT_TRUE(eventually(20, [&] {
    const json device = epctl({"devices"})["devices"][0];
    return device["restarts"] == 1 && device["state"] == "ready";
  }));
  EXPECT_EQ(epctl({"waits", "live"})["groups"], waits);
  for (const json& rank : epctl({"stats"})["ranks"]) {
    const std::uint64_t completed = rank["statistics"]["completed"];
    EXPECT_EQ(completed, rank["device"] == "host:0" ? 0u : 2 * script.rounds)
        << "what an engine counts is its own";
  }
  stage->stop.open();
  expect_all_ok(wait_all(ranks, 60));
}

TEST_F(Operator, WhatIsSetOutlivesEnginesAndYieldsToAChangedFile) {
  start();
  epctl({"set", "device", "host:0", "sms=3"});
  const auto sms = [&](std::uint32_t device) { return epctl({"devices"})["devices"][device]["sms"]; };
  EXPECT_TRUE(eventually(10, [&] { return sms(0) == 3; }));
  send_signal(daemon_->engine(0), SIGKILL);
  EXPECT_TRUE(eventually(20, [&] {
    const json device = epctl({"devices"})["devices"][0];
    return device["restarts"] == 1 && device["state"] == "ready" && device["sms"] == 3;
  }));
  daemon_->rewrite({{"limits.max_sessions", "9"}});  // says nothing new of SMs
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(eventually(10, [&] { return epctl({"status"})["daemon"]["config_generation"] == 2; }));
  sleep_ms(100);
  EXPECT_EQ(sms(0), 3);
  daemon_->rewrite_sms(1);
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(eventually(10, [&] { return sms(0) == 1 && sms(1) == 1; }));
}

TEST_F(Operator, SettingsOutOfRangeNameWhatIsAllowed) {
  start();
  struct Bad {
    std::vector<std::string> arguments;
    std::string says;
  };
  Shared<Stage> stage;
  RankProcess rank([&]() -> std::string {
    const Session session(daemon_->socket(), "host:0");
    const Group group(session, small_config("bounded", 0, 1));
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 1; }));
  for (const Bad& bad :
       {Bad{{"device", "host:0", "sms=0"}, "INVALID_ARGUMENT: sms is 0; allowed: 1.."},
        Bad{{"device", "host:0", "sms=100000"}, "INVALID_ARGUMENT: sms is 100000; allowed: 1.."},
        Bad{{"device", "host:9", "sms=1"}, "NOT_FOUND: device is \"host:9\"; allowed: host:0, host:1"},
        Bad{{"group", "bounded", "priority=8"}, "priority is 8; allowed: -8..7"},
        Bad{{"group", "bounded", "priority=-9"}, "priority is -9; allowed: -8..7"},
        Bad{{"group", "bounded", "linger_us=50001"}, "linger_us is 50001; allowed: 0..50000"},
        Bad{{"group", "bounded", "linger_us=5"}, "linger_us is 5; allowed: 0, since group "},
        Bad{{"group", "bounded", "sms=100000"}, "sms is 100000; allowed: 0.."},
        Bad{{"group", "unknown", "sms=1"}, "NOT_FOUND: there is no group \"unknown\""}}) {
    std::vector<std::string> arguments = bad.arguments;
    arguments.insert(arguments.begin(), "set");
    const CommandResult result = daemon_->epctl(arguments);
    EXPECT_EQ(result.exit_code, 1) << bad.says;
    EXPECT_NE(result.err.find(bad.says), std::string::npos) << result.err;
  }
  stage->stop.open();
  EXPECT_TRUE(rank.wait(30).ok);
}

// A stopped engine keeps the user's group before, which has failed.
TEST_F(Operator, AFailedGroupLeavesItsNameToTheNextOne) {
  start();
  Shared<Stage> stage;
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      const Session session(daemon_->socket(), daemon_->device(rank));
      {
        const Group before(session, small_config("again", rank, 2));
        stage->joined.arrive();
        (rank == 0 ? stage->go : stage->stop).wait_for(1);
      }
      if (rank == 1) return "";
      const Group group(session, small_config("again", 0, 1));
      stage->joined.arrive();
      stage->stop.wait_for(1);
      return "";
    });
  }
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 2; }));
  const pid_t engine = daemon_->engine(1);
  send_signal(engine, SIGSTOP);
  stage->go.open();
  EXPECT_TRUE(eventually(30, [&] { return stage->joined.count == 3; }));
  EXPECT_EQ(epctl({"groups"})["groups"].size(), 2u) << epctl({"groups"});
  const CommandResult set = daemon_->epctl({"set", "group", "again", "priority=1"});
  EXPECT_EQ(set.exit_code, 0) << set.err;
  const json groups = epctl({"groups"})["groups"];
  EXPECT_EQ(groups.back()["priority"], 1) << groups;
  send_signal(engine, SIGCONT);
  stage->stop.open();
  expect_all_ok(wait_all(ranks, 60));
}

// The daemon's main thread is held while the last rank comes and an operator sets the group, so that both are
// in one turn of its loop: an engine must hear of the group before it hears of its settings.
TEST_F(Operator, SettingsThatComeWithTheLastRankEndNoEngine) {
  start();
  const std::vector<pid_t> engines = daemon_->engine_of_each_device();
  Shared<Stage> stage;
  std::vector<RankProcess> ranks;
  const auto add_rank = [&](std::uint32_t number) {
    ranks.emplace_back([&, number]() -> std::string {
      const Session session(daemon_->socket(), daemon_->device(number));
      const Group group(session, small_config("set-early", number, 2));
      stage->joined.arrive();
      stage->stop.wait_for(1);
      return "";
    });
  };
  add_rank(0);
  ASSERT_TRUE(eventually(30, [&] { return epctl({"groups"})["groups"].size() == 1; }));
  // The second rank has attached, and joins when it is told to.
  RankProcess last([&]() -> std::string {
    const Session session(daemon_->socket(), daemon_->device(1));
    stage->joined.arrive();
    stage->go.wait_for(1);
    const Group group(session, small_config("set-early", 1, 2));
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 1; }));
  // Only this one of all its threads is stopped.
  if (::ptrace(PTRACE_SEIZE, daemon_->pid(), nullptr, nullptr) != 0)
    GTEST_SKIP() << "needs to trace the daemon: " << std::strerror(errno);
  ASSERT_EQ(::ptrace(PTRACE_INTERRUPT, daemon_->pid(), nullptr, nullptr), 0);
  ASSERT_EQ(::waitpid(daemon_->pid(), nullptr, __WALL), daemon_->pid());
  stage->go.open();
  sleep_ms(200);
  auto set = std::async(std::launch::async, [&] {
    return daemon_->epctl({"set", "group", "set-early", "sms=1"});
  });
  sleep_ms(300);
  ASSERT_EQ(::ptrace(PTRACE_DETACH, daemon_->pid(), nullptr, nullptr), 0);
  EXPECT_EQ(set.get().exit_code, 0);
  EXPECT_TRUE(eventually(30, [&] { return stage->joined.count == 3; }));
  stage->stop.open();
  for (RankProcess& rank : ranks) EXPECT_TRUE(rank.wait(30).ok);
  EXPECT_TRUE(last.wait(30).ok);
  EXPECT_EQ(daemon_->engine_of_each_device(), engines);
}

// Health, status and log continued to say that it serves.
TEST_F(Operator, ADaemonWhoseSocketWasRemovedSaidThatItServes) {
  start();
  EXPECT_EQ(daemon_->epctl({"health"}).exit_code, 0);
  ASSERT_EQ(::unlink(daemon_->socket().c_str()), 0);
  EXPECT_TRUE(eventually(20, [&] { return daemon_->epctl({"health"}).exit_code == 4; }));
  const std::string problem = daemon_->socket() + " has been removed: clients can't attach";
  EXPECT_EQ(epctl({"status"})["daemon"]["socket_problem"], problem);
  EXPECT_NE(daemon_->epctl({"status"}).out.find("PROBLEM         " + problem + "; restart epd"),
            std::string::npos);
  EXPECT_NE(daemon_->epctl({"events"}).out.find(problem), std::string::npos);
  const std::string doctor = daemon_->epctl({"doctor"}).out;
  EXPECT_NE(doctor.find(problem), std::string::npos) << doctor;
  EXPECT_EQ(doctor.find("start epd,"), std::string::npos) << doctor;
}

}  // namespace
}  // namespace epd::test
