// The supervisor is stopped (SIGSTOP) for longer than anybody may take to answer. Messages that came
// meanwhile were in time: nobody is killed or refused because the supervisor has not read them.
#include "common/signal.h"
#include "fault.h"
#include "hostile.h"
#include "support/engine_pages.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <memory>

namespace epd::test {
namespace {

constexpr int kTries = 2;
constexpr int kHangMs = 30'000;
constexpr int kAllowedMs = 1'200;
constexpr int kStallMs = 2 * kAllowedMs;
constexpr int kJoinMs = 5'000;  // the group must be seen, and the supervisor stopped, within it
constexpr std::uint32_t kOperationMs = 200;

class Stalled : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 2;
    options.settings = patient_settings();
    options.settings.emplace_back("timeouts.engine_ack_ms", std::to_string(kAllowedMs));
    options.settings.emplace_back("timeouts.attach_ms", std::to_string(kAllowedMs));
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
    engines_ = daemon_->engine_of_each_device();
  }
  void TearDown() override {
    EXPECT_EQ(daemon_->engine_of_each_device(), engines_) << "an engine was restarted";
    EXPECT_EQ(daemon_->log().find("engine killed"), std::string::npos);
    if (daemon_->running()) daemon_->stop();
  }
  bool logged(const std::string& text) const {
    return eventually(20, [&] { return daemon_->log().find(text) != std::string::npos; });
  }
  // The messages of `meanwhile` come while the supervisor is stopped.
  void stall(const std::function<void()>& meanwhile, int ms = kStallMs) const {
    ASSERT_TRUE(stop_process(daemon_->pid()));
    meanwhile();
    sleep_ms(ms);
    daemon_->signal(SIGCONT);
  }

  std::unique_ptr<Daemon> daemon_;
  std::vector<pid_t> engines_;
};

struct Stage {
  Gate ready;
  Gate stopped;
};

// Rank 0 runs out of time, since rank 1 does not come; then both continue.
std::string rank_of_a_break(const Daemon& daemon, const Case& c, const std::string& name, std::uint32_t rank,
                            Stage& stage) {
  const Session session(daemon.socket(), daemon.device(rank));
  const Group group(session, c.config(name.c_str(), rank));
  stage.ready.arrive();
  stage.stopped.wait_for(1);
  if (rank == 0) {
    epd_ticket_t ticket = 0;
    must(submit_dispatch(group, c, rank, 0, kOperationMs, &ticket), "dispatch");
    epd_result_t result;
    epd_result_init(&result);
    must(group.wait(ticket, kHangMs, &result), "the operation", EPD_DEADLINE_EXCEEDED);
  }
  if (!eventually(20, [&] { return epd_group_check(group.get(), nullptr) != EPD_OK; }))
    return "no break came";
  ScriptOptions options;
  options.rounds = 4;
  options.first_op = resume(group, kHangMs);
  return ScriptRunner(group, c, rank, options).run().to_string();
}

// An engine answers the break while the supervisor is stopped.
TEST_F(Stalled, AnEnginesAnswerToABreakIsReadBeforeItIsJudged) {
  const Case c = fault_case(2);
  for (int i = 0; i < kTries; ++i) {
    const std::string name = "try" + std::to_string(i);
    Shared<Stage> stage;
    std::vector<RankProcess> ranks =
        start_ranks(2, [&](std::uint32_t rank) { return rank_of_a_break(*daemon_, c, name, rank, *stage); });
    ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == 2; }));
    ASSERT_TRUE(stop_process(engines_[1]));
    stage->stopped.open();
    EXPECT_TRUE(logged("name=\"" + name + "\" epoch=1 fatal=false"));
    stall([&] { send_signal(engines_[1], SIGCONT); });
    expect_all_ok(wait_all(ranks, 60));
    ASSERT_EQ(daemon_->engine_of_each_device(), engines_) << "try " << i;
  }
}

TEST_F(Stalled, AHelloIsReadBeforeItsConnectionIsJudged) {
  for (int i = 0; i < kTries; ++i) {
    const RawClient client(daemon_->socket());
    sleep_ms(100);  // accepted
    const abi::Hello hello = RawClient::good_hello();
    stall([&] { EXPECT_TRUE(client.send(abi::AttachType::kHello, &hello, sizeof(hello))); });
    const std::optional<Packet> answer = client.receive(20);
    ASSERT_TRUE(answer);
    ASSERT_EQ(answer->header.type, static_cast<std::uint16_t>(abi::AttachType::kWelcome))
        << refusal(answer) << "; try " << i;
  }
}

TEST_F(Stalled, AJoinIsReadBeforeThoseWhoWaitForItAreRefused) {
  for (int i = 0; i < kTries; ++i) {
    const std::string name = "try" + std::to_string(i);
    Shared<Stage> stage;
    std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
      HostileSession session(daemon_->socket(), daemon_->device(rank));
      abi::Join join = HostileSession::good_join(name);
      join.shape.num_ranks = 2;
      join.rank = static_cast<std::int32_t>(rank);
      join.timeout_ms = kJoinMs;
      stage->ready.arrive();
      if (rank == 1) stage->stopped.wait_for(1);
      const std::string answer = session.ask(abi::AttachType::kJoin, join);
      RANK_CHECK(answer == "OK", answer);
      return "";
    });
    ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == 2; }));
    ASSERT_TRUE(
        eventually(4, [&] { return daemon_->epctl({"groups"}).out.find(name) != std::string::npos; }));
    stall([&] { stage->stopped.open(); }, kJoinMs + 500);
    expect_all_ok(wait_all(ranks, 60));
  }
}

}  // namespace
}  // namespace epd::test
