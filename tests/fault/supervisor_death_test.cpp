// The supervisor dies by kill -9: clients hear of it at once, engines follow it, and a new daemon on
// the same socket serves the same clients.
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <atomic>
#include <functional>
#include <memory>

namespace epd::test {
namespace {

constexpr double kNoticeSeconds = 5;  // generous: only a hang takes that long

struct Stage {
  Gate ready;
  Gate noticed;
  Gate restarted;
  std::atomic<double> killed_at{0};
  std::atomic<int> hook_status{-1};
};

class SupervisorDeath : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 2;
    options.settings = patient_settings();
    daemon_ = std::make_unique<Daemon>(options);
    ASSERT_TRUE(daemon_->start());
  }

  // kill -9, and what must follow; then a new daemon in the same place.
  void kill_and_restart(const std::function<void()>& after_kill) {
    const std::vector<pid_t> engines = daemon_->engines();
    ASSERT_EQ(engines.size(), 2u);
    daemon_->signal(SIGKILL);
    after_kill();
    ASSERT_NE(daemon_->wait_exit(10), -1);
    for (const pid_t engine : engines)
      EXPECT_TRUE(eventually(kNoticeSeconds, [&] { return !is_running(engine); }))
          << "engine " << engine << " is an orphan";
    ASSERT_TRUE(daemon_->start()) << "a dead daemon's sockets are in the way";
  }

  std::unique_ptr<Daemon> daemon_;
};

void hook(const epd_result_t* result, void* user) {
  static_cast<Stage*>(user)->hook_status = result->status;
}

epd_ticket_t submit(const Group& group, std::uint32_t slot) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = slot;
  args.timeout_ms = 60000;
  epd_ticket_t ticket = 0;
  must(group.dispatch(&args, &ticket, nullptr), "dispatch");
  return ticket;
}

void expect_noticed(Stage& stage, const char* who) {
  const double noticed = now_s() - stage.killed_at;
  RANK_CHECK(noticed < kNoticeSeconds, "noticed after " + std::to_string(noticed) + " s");
  std::printf("%s heard of it %.1f ms after the kill\n", who, noticed * 1000);
  std::fflush(stdout);
}

// Every call on a session whose daemon is gone says so.
void everything_is_lost(const Session& session, const Group& group) {
  must(epd_session_check(session.get()), "check", EPD_DAEMON_LOST);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = 2;
  epd_ticket_t ticket = 0;
  must(group.dispatch(&args, &ticket, nullptr), "dispatch", EPD_DAEMON_LOST);
  must(epd_noop(group.get(), 2, EPD_NO_STREAM, &ticket), "noop", EPD_DAEMON_LOST);
  must(epd_group_resume(group.get(), 2000, nullptr), "resume", EPD_DAEMON_LOST);
  const epd_group_config_t config = small_config("after", 0, 1);
  epd_group_t* other = nullptr;
  must(epd_group_join(session.get(), &config, &other), "join", EPD_DAEMON_LOST);
  static_cast<std::uint32_t*>(group.buffers(0).x)[0] = 1;  // the memory is still there
}

TEST_F(SupervisorDeath, ClientsHearOfItAndAttachAgain) {
  const Case c = fault_case(2, 3);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const std::string device = daemon_->device(rank);
    {
      const Session session(daemon_->socket(), device);
      const Group group(session, c.config("first", rank));
      if (rank == 0) {  // waits in an operation, with a hook on another
        const epd_ticket_t hooked = submit(group, 0);
        const epd_ticket_t ticket = submit(group, 1);
        must(epd_ticket_on_complete(group.get(), hooked, hook, &*stage), "hook");
        stage->ready.arrive();
        must(group.wait(ticket, 60000), "the operation in flight", EPD_DAEMON_LOST);
        expect_noticed(*stage, "a waiting client");
        RANK_CHECK(eventually(kNoticeSeconds, [&] { return stage->hook_status == EPD_DAEMON_LOST; }),
                   "the hook says " + std::to_string(stage->hook_status));
      } else {  // does nothing but look now and then
        stage->ready.arrive();
        RANK_CHECK(eventually(30, [&] { return epd_session_check(session.get()) != EPD_OK; }), "check");
        expect_noticed(*stage, "an idle client");
      }
      everything_is_lost(session, group);
      stage->noticed.arrive();
    }
    stage->restarted.wait_for(1);
    const Session session(daemon_->socket(), device);
    const Group group(session, c.config("first", rank));
    ScriptOptions options;
    ScriptRunner(group, c, rank, options).run();
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == 2; }));
  sleep_ms(50);
  stage->killed_at = now_s();
  kill_and_restart([&] { EXPECT_TRUE(eventually(30, [&] { return stage->noticed.count == 2; })); });
  stage->restarted.open();
  expect_all_ok(wait_all(ranks, 60));
  daemon_->stop();
}

TEST_F(SupervisorDeath, InAStormOfSubmissions) {
  for (std::uint32_t turn = 0; turn < 3; ++turn) {
    SCOPED_TRACE("turn " + std::to_string(turn));
    const Case c = fault_case(3, 1 + turn);
    Shared<std::atomic<std::uint64_t>> progress;
    std::vector<RankProcess> ranks =
        start_group(*daemon_, c, "storm", [&](const Group& group, std::uint32_t rank) -> std::string {
          ScriptOptions options;
          options.rounds = 100000;
          options.end = EPD_DAEMON_LOST;
          options.on_submit = [&](std::uint64_t) { progress->fetch_add(1); };
          return ScriptRunner(group, c, rank, options).run().to_string();
        });
    ASSERT_TRUE(eventually(30, [&] { return progress->load() > 50; }));
    kill_and_restart([&] { expect_all_ok(wait_all(ranks, 30)); });
    expect_serves(*daemon_, 3, "storm");
    if (HasFailure()) return;
  }
  daemon_->stop();
}

TEST_F(SupervisorDeath, ASecondDaemonOnALiveSocketIsRefused) {
  const CommandResult second =
      run_command({daemon_program(), "serve", "--config", daemon_->directory() + "/epd.toml"}, 20);
  EXPECT_GT(second.exit_code, 0) << second.err;
  EXPECT_NE(second.err.find(daemon_->socket()), std::string::npos) << second.err;
  expect_serves(*daemon_, 2, "still-here");
  daemon_->stop();
}

}  // namespace
}  // namespace epd::test
