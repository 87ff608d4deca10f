// A client dies by kill -9: its peers hear of it, its memory is freed, the daemon serves on.
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <atomic>
#include <memory>

namespace epd::test {
namespace {

constexpr int kHangMs = 30000;

class ClientDeath : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 3;
    options.settings = patient_settings();
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_->running()) daemon_->stop();
  }
  std::unique_ptr<Daemon> daemon_;
};

struct Times {
  Gate ready;                        // ranks that are where they shall be when the kill comes
  Gate killed;                       // opened by the test
  Gate left;                         // survivors that have left their group
  std::atomic<double> killed_at{0};  // seconds
  std::atomic<std::uint64_t> progress{0};
};

void must_be_lost(const Group& group, epd_status_t submitted, epd_ticket_t ticket, std::uint32_t lost) {
  if (submitted == EPD_OK) {
    epd_result_t result;
    epd_result_init(&result);
    must(group.wait(ticket, kHangMs, &result), "the operation", EPD_RANK_LOST);
    RANK_CHECK(result.failed_rank == static_cast<std::int32_t>(lost),
               "the failed_rank is " + std::to_string(result.failed_rank));
  } else {
    must(submitted, "the submission", EPD_RANK_LOST);
  }
  must_say("rank " + std::to_string(lost));
}

TEST_F(ClientDeath, WhileIdle) {
  const Case c = fault_case(3);
  const std::size_t memfds = settled_memfds(*daemon_);
  Shared<Times> times;
  std::vector<RankProcess> ranks = start_ranks(3, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    double noticed = 0;
    {
      const Group group(session, c.config("idle", rank));
      ScriptOptions options;
      ScriptRunner(group, c, rank, options).run();
      times->ready.arrive();
      times->killed.wait_for(1);
      epd_ticket_t ticket = 0;
      const epd_status_t submitted = submit_dispatch(group, c, rank, 0, kHangMs, &ticket);
      must_be_lost(group, submitted, ticket, 1);
      noticed = now_s() - times->killed_at;
    }
    must(epd_session_check(session.get()), "the session lives on");
    return std::to_string(noticed * 1000);
  });
  ASSERT_TRUE(eventually(30, [&] { return times->ready.count == 3; }));
  times->killed_at = now_s();
  ranks[1].kill(SIGKILL);
  ranks[1].wait(10);
  const bool reaped =
      eventually(10, [&] { return daemon_->log().find("how=\"died\"") != std::string::npos; });
  EXPECT_TRUE(reaped);
  times->killed.open();
  for (const std::uint32_t rank : {0u, 2u}) {
    const RankOutcome outcome = ranks[rank].wait(40);
    EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
    std::printf("rank %u heard of the loss %s ms after the kill\n", rank, outcome.text.c_str());
  }
  EXPECT_TRUE(eventually(8, [&] { return memfds_held(*daemon_) == memfds; }))
      << "arenas are left: " << memfds_held(*daemon_) << " memfds and mappings, before " << memfds;
  expect_serves(*daemon_, 3, "idle");  // the name is free again
}

TEST_F(ClientDeath, WhileWaitingInAnOperation) {
  const Case c = fault_case(3);
  const std::size_t memfds = settled_memfds(*daemon_);
  Shared<Times> times;
  std::vector<RankProcess> ranks =
      start_group(*daemon_, c, "waiting", [&](const Group& group, std::uint32_t rank) -> std::string {
        if (rank == 2) {  // holds everybody up
          times->ready.arrive();
          times->killed.wait_for(1);
          sleep_ms(100);
        }
        epd_ticket_t ticket = 0;
        const epd_status_t submitted = submit_dispatch(group, c, rank, 0, kHangMs, &ticket);
        if (rank != 2) times->ready.arrive();
        must_be_lost(group, submitted, ticket, 1);
        const double noticed = now_s() - times->killed_at;
        return std::to_string(noticed * 1000);
      });
  ASSERT_TRUE(eventually(30, [&] { return times->ready.count == 3; }));
  sleep_ms(50);
  times->killed_at = now_s();
  ranks[1].kill(SIGKILL);
  times->killed.open();
  for (const std::uint32_t rank : {0u, 2u}) {
    const RankOutcome outcome = ranks[rank].wait(40);
    EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
    std::printf("rank %u heard of the loss %s ms after the kill\n", rank, outcome.text.c_str());
  }
  ranks[1].wait(10);
  EXPECT_TRUE(eventually(8, [&] { return memfds_held(*daemon_) == memfds; }))
      << "arenas are left: " << memfds_held(*daemon_) << ", before " << memfds;
  expect_serves(*daemon_, 3, "waiting");
}

TEST_F(ClientDeath, InAStormOfSubmissions) {
  const std::size_t memfds = settled_memfds(*daemon_);
  for (std::uint32_t turn = 0; turn < 8; ++turn) {
    SCOPED_TRACE("turn " + std::to_string(turn));
    Case c = fault_case(4, 1 + turn % 4);
    c.seed += turn;
    Shared<Times> times;
    std::vector<RankProcess> ranks =
        start_group(*daemon_, c, "storm", [&](const Group& group, std::uint32_t rank) -> std::string {
          ScriptOptions options;
          options.rounds = 100000;
          options.order = static_cast<Order>(turn % 3);
          options.end = EPD_RANK_LOST;
          options.on_submit = [&](std::uint64_t) { times->progress.fetch_add(1); };
          const ScriptStats stats = ScriptRunner(group, c, rank, options).run();
          RANK_CHECK(stats.failures.size() <= 1, "RANK_LOST and nothing else: " + stats.to_string());
          return stats.to_string();
        });
    ASSERT_TRUE(eventually(30, [&] { return times->progress > 40 + turn * 37; }));
    const std::uint32_t victim = turn % 4;
    ranks[victim].kill(SIGKILL);
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      const RankOutcome outcome = ranks[rank].wait(40);
      if (rank != victim) {
        EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_TRUE(eventually(8, [&] { return memfds_held(*daemon_) == memfds; }))
      << "arenas are left: " << memfds_held(*daemon_) << ", before " << memfds;
  expect_serves(*daemon_, 4, "storm");
}

TEST_F(ClientDeath, WhileTheGroupForms) {
  const Case c = fault_case(2);
  RankProcess doomed([&]() -> std::string {
    const Session session(daemon_->socket(), "host:0");
    const Group group(session, c.config("forming", 0));
    return "";
  });
  ASSERT_TRUE(eventually(10, [&] {
    return daemon_->epctl({"--json", "groups"}).out.find("\"forming\"") != std::string::npos;
  }));
  doomed.kill(SIGKILL);
  doomed.wait(10);
  expect_serves(*daemon_, 2, "forming");  // rank 0 is free again
}

TEST_F(ClientDeath, ABystandingGroupNoticesNothing) {
  const Case c = fault_case(3);
  Shared<Times> times;
  std::vector<RankProcess> bystanders =
      start_group(*daemon_, c, "bystander", [&](const Group& group, std::uint32_t rank) -> std::string {
        ScriptOptions options;
        options.rounds = 300;
        options.on_submit = [&](std::uint64_t) { times->progress.fetch_add(1); };
        return ScriptRunner(group, c, rank, options).run().to_string();
      });
  ASSERT_TRUE(eventually(30, [&] { return times->progress > 20; }));
  for (int turn = 0; turn < 5; ++turn) {
    Shared<Gate> joined;
    std::vector<RankProcess> pair = start_ranks(2, [&](std::uint32_t rank) -> std::string {
      const Session session(daemon_->socket(), daemon_->device(rank));
      const Group group(session, fault_case(2).config("doomed", rank));
      joined->arrive();
      sleep_ms(60000);
      return "";
    });
    ASSERT_TRUE(eventually(30, [&] { return joined->count == 2; }));
    for (const RankProcess& rank : pair) rank.kill(SIGKILL);
    for (RankProcess& rank : pair) rank.wait(10);
  }
  expect_all_ok(wait_all(bystanders, 90));
}

}  // namespace
}  // namespace epd::test
