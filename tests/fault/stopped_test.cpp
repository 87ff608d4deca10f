// SIGSTOP is not death: a stopped process is waited for, peers hear DEADLINE_EXCEEDED meanwhile, and after
// SIGCONT everything continues.
#include "common/signal.h"
#include "fault.h"
#include "support/engine_pages.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <atomic>
#include <memory>

namespace epd::test {
namespace {

constexpr int kHangMs = 30000;
constexpr std::uint32_t kOperationMs = 300;

class Stopped : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 2;
    options.settings = patient_settings();
    options.settings.emplace_back("timeouts.engine_watchdog_ms", "2000");
    options.settings.emplace_back("timeouts.engine_ack_ms", "2000");
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_->running()) daemon_->stop();
  }
  std::unique_ptr<Daemon> daemon_;
};

struct Stage {
  Gate ready;
  Gate stopped;
  Gate heard;
  Gate gone_on;
};

epd_ticket_t dispatch(const Group& group, const Case& c, std::uint32_t rank) {
  epd_ticket_t ticket = 0;
  must(submit_dispatch(group, c, rank, 0, kOperationMs, &ticket), "dispatch");
  return ticket;
}

// After the stop: both continue where the group agrees, and are right to the bit.
std::string go_on(const Group& group, const Case& c, std::uint32_t rank) {
  ScriptOptions options;
  options.rounds = 8;
  options.first_op = resume(group, kHangMs);
  return ScriptRunner(group, c, rank, options).run().to_string();
}

void must_exceed(const Group& group, epd_ticket_t ticket, std::int32_t failed_rank) {
  epd_result_t result;
  epd_result_init(&result);
  must(group.wait(ticket, kHangMs, &result), "the operation", EPD_DEADLINE_EXCEEDED);
  RANK_CHECK(epd_ticket_pending(group.get(), ticket) == 0, "it has ended");
  RANK_CHECK(result.failed_rank == failed_rank, "the failed_rank is " + std::to_string(result.failed_rank));
  must_say("rank " + std::to_string(failed_rank));
}

TEST_F(Stopped, AClientIsNotDeclaredDeadAndGoesOn) {
  const Case c = fault_case(2);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks =
      start_group(*daemon_, c, "client", [&](const Group& group, std::uint32_t rank) -> std::string {
        stage->ready.arrive();
        stage->stopped.wait_for(1);
        if (rank == 0) {
          must_exceed(group, dispatch(group, c, rank), 1);
          stage->heard.arrive();
        }
        stage->gone_on.wait_for(1);
        return go_on(group, c, rank);
      });
  ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == 2; }));
  const double since = now_s();
  ASSERT_TRUE(stop_process(ranks[1].pid()));
  stage->stopped.open();
  EXPECT_TRUE(eventually(20, [&] { return stage->heard.count == 1; }));
  while (now_s() - since < 3) sleep_ms(20);  // longer than the watchdog, the only heartbeat there is
  EXPECT_EQ(daemon_->log().find("how=\"died\""), std::string::npos);
  ranks[1].kill(SIGCONT);
  stage->gone_on.open();
  expect_all_ok(wait_all(ranks, 60));
}

TEST_F(Stopped, AnEngineIsNotKilledAndNobodyWaitsForIt) {
  const Case c = fault_case(2);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks =
      start_group(*daemon_, c, "engine", [&](const Group& group, std::uint32_t rank) -> std::string {
        stage->ready.arrive();
        stage->stopped.wait_for(1);
        const epd_ticket_t ticket = dispatch(group, c, rank);
        if (rank == 0) {
          must_exceed(group, ticket, 1);
          must_say("the engine of rank 1 has not responded for");  // its client did submit
          epd_resume_info_t info;
          epd_resume_info_init(&info);
          must(epd_group_resume(group.get(), 50, &info), "resume", EPD_DEADLINE_EXCEEDED);
        } else {  // its own engine is the one that can't answer
          epd_result_t result;
          epd_result_init(&result);
          must(group.wait(ticket, EPD_FOREVER, &result), "a wait for ever", EPD_DEADLINE_EXCEEDED);
          RANK_CHECK(epd_ticket_pending(group.get(), ticket) == 1, "it has not ended");
          must_say("stopped");
        }
        stage->heard.arrive();
        stage->gone_on.wait_for(1);
        if (rank == 1) must_exceed(group, ticket, 1);
        return go_on(group, c, rank);
      });
  ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == 2; }));
  const pid_t engine = daemon_->engine(1);
  const double since = now_s();
  ASSERT_TRUE(stop_process(engine));
  stage->stopped.open();
  EXPECT_TRUE(eventually(30, [&] { return stage->heard.count == 2; }));
  while (now_s() - since < 6.5) sleep_ms(20);  // three times what the watchdog and a break allow
  EXPECT_EQ(daemon_->engine(1), engine);
  send_signal(engine, SIGCONT);
  stage->gone_on.open();
  expect_all_ok(wait_all(ranks, 60));
  EXPECT_EQ(daemon_->engine(1), engine) << "the same process";
  std::string log;
  std::size_t said = std::string::npos;
  EXPECT_TRUE(eventually(20, [&] {
    log = daemon_->log();
    said = log.find("engine is stopped");
    return said != std::string::npos;
  }));
  EXPECT_EQ(log.find("engine is stopped", said + 1), std::string::npos) << "said once";
}

// The rank that leaves has its engine stopped: what it had submitted can't be known.
TEST_F(Stopped, AnEngineDoesNotKeepItsGroupFromEnding) {
  const Case c = fault_case(2);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks =
      start_group(*daemon_, c, "ending", [&](const Group& group, std::uint32_t rank) -> std::string {
        stage->ready.arrive();
        stage->stopped.wait_for(1);
        if (rank == 1) sleep_ms(60000);  // until it is killed
        epd_dispatch_args_t args;
        epd_dispatch_args_init(&args);
        fill_dispatch(c, group.buffers(0), Input{});
        epd_ticket_t ticket = 0;
        epd_status_t status = group.dispatch(&args, &ticket, nullptr);
        if (status == EPD_OK) status = group.wait(ticket, kHangMs);
        RANK_CHECK(status == EPD_RANK_LOST, std::string(epd_status_name(status)) + ": " + epd_last_error());
        return "";
      });
  ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == 2; }));
  const pid_t engine = daemon_->engine(1);
  ASSERT_TRUE(stop_process(engine));
  ranks[1].kill(SIGKILL);
  ranks[1].wait(10);
  stage->stopped.open();
  const RankOutcome outcome = ranks[0].wait(20);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  send_signal(engine, SIGCONT);
  expect_serves(*daemon_, 2, "ending");
  EXPECT_EQ(daemon_->engine(1), engine);
}

}  // namespace
}  // namespace epd::test
