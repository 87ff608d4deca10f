// A client dies by kill -9 under load: its peers hear of it, its memory is freed, bystanders notice nothing.
// client_kill_points_test.cpp has each step of a client's life.
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <atomic>
#include <memory>

namespace epd::test {
namespace {

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

using Progress = std::atomic<std::uint64_t>;

TEST_F(ClientDeath, InAStormOfSubmissions) {
  const std::size_t memfds = settled_memfds(*daemon_);
  for (std::uint32_t turn = 0; turn < 8; ++turn) {
    SCOPED_TRACE("turn " + std::to_string(turn));
    Case c = fault_case(4, 1 + turn % 4);
    c.seed += turn;
    Shared<Progress> progress;
    std::vector<RankProcess> ranks =
        start_group(*daemon_, c, "storm", [&](const Group& group, std::uint32_t rank) -> std::string {
          ScriptOptions options;
          options.rounds = 100000;
          options.order = static_cast<Order>(turn % 3);
          options.end = EPD_RANK_LOST;
          options.on_submit = [&](std::uint64_t) { progress->fetch_add(1); };
          const ScriptStats stats = ScriptRunner(group, c, rank, options).run();
          RANK_CHECK(stats.failures.size() <= 1, "RANK_LOST and nothing else: " + stats.to_string());
          return stats.to_string();
        });
    ASSERT_TRUE(eventually(30, [&] { return *progress > 40 + turn * 37; }));
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

TEST_F(ClientDeath, ABystandingGroupNoticesNothing) {
  const Case c = fault_case(3);
  Shared<Progress> progress;
  std::vector<RankProcess> bystanders =
      start_group(*daemon_, c, "bystander", [&](const Group& group, std::uint32_t rank) -> std::string {
        ScriptOptions options;
        options.rounds = 300;
        options.on_submit = [&](std::uint64_t) { progress->fetch_add(1); };
        return ScriptRunner(group, c, rank, options).run().to_string();
      });
  ASSERT_TRUE(eventually(30, [&] { return *progress > 20; }));
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
