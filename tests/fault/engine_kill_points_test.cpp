// kill -9 of an engine in every state that an operation, a group, a session or the engine itself can be in.
// The states are real and made to last: a rank that has not submitted, a peer's engine that is stopped, an
// operation with many rows on one SM. Each is confirmed on the page of the stopped engine before it dies.
// Afterwards every rank has ENGINE_RESTARTED and nothing else, resumes, redoes, and is right to the bit.
#include "common/signal.h"
#include "fault.h"
#include "support/engine_pages.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <atomic>
#include <memory>

namespace epd::test {
namespace {

using abi::Op;
using abi::OpStage;

constexpr std::uint32_t kRanks = 3;  // at most; one on each device
constexpr std::uint32_t kVictim = 0;
constexpr std::uint32_t kHolder = 1;  // the rank that others wait for
constexpr std::uint32_t kThird = 2;

struct Stage {
  Gate go;  // opened when the holder may go on
  Gate finished;
  std::atomic<std::uint32_t> holding;
};

// Takes milliseconds to move, and few tokens to check.
Case long_to_move() {
  Case c = fault_case(2, 2);
  c.max_tokens = 256;
  c.hidden = 8192;
  c.topk = 2;
  c.sizes = Sizes::kFull;
  return c;
}

// Takes milliseconds to count, and comes to nothing.
Case long_to_plan() {
  Case c = fault_case(2, 2);
  c.max_tokens = 16384;
  c.hidden = 128;
  c.topk = 32;
  c.num_experts = 64;
  c.routing = Routing::kNothing;
  c.sizes = Sizes::kFull;
  return c;
}

class EngineKillPoints : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = kRanks;
    options.sms = 1;
    options.settings = patient_settings();
    // Engines that the test has stopped are not to be killed for it.
    options.settings.emplace_back("timeouts.engine_ack_ms", "30000");
    options.settings.emplace_back("timeouts.engine_watchdog_ms", "60000");
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
    pages_ = std::make_unique<EnginePages>(*daemon_);
    before_ = settled_census(*daemon_);
  }
  void TearDown() override {
    ranks_.clear();
    if (daemon_->running()) daemon_->stop();
  }

  // All ranks run the same rounds in turn; the holder waits for `go` after `hold_after` submissions.
  static constexpr std::uint64_t kNoHold = ~std::uint64_t{0};
  void start_ranks(const Case& c, std::uint32_t rounds, std::uint64_t hold_after) {
    stage_ = std::make_unique<Shared<Stage>>();
    ranks_.clear();
    for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) {
      ranks_.emplace_back([this, c, rank, rounds, hold_after]() -> std::string {
        Stage& stage = **stage_;
        const Session session(daemon_->socket(), daemon_->device(rank));
        const Group group(session, c.config("killed", rank));
        const auto hold = [&](std::uint64_t submitted) {
          if (rank != kHolder || submitted != hold_after) return;
          stage.holding = 1;
          stage.go.wait_for(1);
        };
        ScriptOptions options;
        options.rounds = rounds;
        options.order = Order::kInTurn;
        options.recover = true;
        options.finished = &stage.finished;
        options.timeout_ms = 60000;
        options.on_submit = hold;
        hold(0);
        const ScriptStats stats = ScriptRunner(group, c, rank, options).run();
        for (const auto& [status, count] : stats.failures)
          RANK_CHECK(status == "ENGINE_RESTARTED", stats.to_string());
        RANK_CHECK(!must_resume_ || rank != kVictim || stats.resumes >= 1,
                   "nothing was redone: " + stats.to_string());
        return stats.to_string();
      });
    }
  }

  void unblock() { (*stage_)->go.open(); }

  // Everything ends well; the daemon holds what it held, and serves.
  void expect_recovery(const char* state) {
    unblock();
    const auto outcomes = wait_all(ranks_, HasFailure() ? 2 : 60);
    expect_all_ok(outcomes);
    std::printf("%-44s victim: %s\n", state, outcomes[kVictim].text.c_str());
    expect_same_census(*daemon_, before_);
    expect_serves(*daemon_, kRanks, "fresh");
  }

  // Another than `former`.
  pid_t engine(std::uint32_t device, pid_t former = -1) {
    pid_t pid = -1;
    EXPECT_TRUE(eventually(20, [&] { return (pid = daemon_->engine(device)) > 0 && pid != former; }))
        << "no engine on " << device;
    return pid;
  }

  // Stops the engine in a moment when one of its operations is in the stage. False: the ranks were through
  // with all their rounds, and there was none.
  bool stop_in(std::uint32_t device, Op op, OpStage stage) {
    return stop_when(
        engine(device), [&] { return pages_->shows(device, op, stage); },
        [&] { return (*stage_)->finished.count > 0; });
  }

  void kill_in(std::uint32_t device, Op op, OpStage stage) {
    const pid_t pid = engine(device);
    ASSERT_TRUE(stop_in(device, op, stage)) << "no operation came to stage " << static_cast<int>(stage);
    kill_now(pid);
  }

  // For stages that end by themselves: which round is caught in it depends on who has the cores.
  void start_until_stopped(const Case& c, std::uint32_t device, Op op, OpStage stage) {
    for (int tries = 0; tries < 30; ++tries) {
      start_ranks(c, 3, kNoHold);
      if (stop_in(device, op, stage)) return;
    }
    FAIL() << "no operation was seen in stage " << static_cast<int>(stage);
  }

  void kill_now(pid_t pid) {
    ASSERT_EQ(send_signal(pid, SIGKILL), 0);
    ASSERT_TRUE(eventually(10, [&] { return !is_running(pid); }));
  }

  // The third engine dies. The holder's is stopped, and its answer is pending: the victim stays in between.
  pid_t break_that_lasts(Op op) {
    EXPECT_TRUE(eventually(20, [&] { return pages_->shows(kVictim, op, OpStage::kWaitReady); }));
    const pid_t holder = engine(kHolder);
    EXPECT_TRUE(stop_process(holder));
    kill_now(engine(kThird));
    EXPECT_TRUE(eventually(20, [&] { return pages_->shows(kVictim, op, OpStage::kBreaking); }));
    return holder;
  }

  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<EnginePages> pages_;
  SystemCensus before_;
  std::unique_ptr<Shared<Stage>> stage_;
  bool must_resume_ = true;  // the victim's rank; false where no operation is in flight
  std::vector<RankProcess> ranks_;
};

const char* name_of(Op op) {
  return op == Op::kDispatch ? "dispatch" : "combine";
}

TEST_F(EngineKillPoints, Planning) {
  const pid_t victim = engine(kVictim);
  ASSERT_NO_FATAL_FAILURE(start_until_stopped(long_to_plan(), kVictim, Op::kDispatch, OpStage::kPlanning));
  kill_now(victim);
  expect_recovery("planning a dispatch");
}

TEST_F(EngineKillPoints, Moving) {
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    SCOPED_TRACE(name_of(op));
    const pid_t victim = engine(kVictim);
    ASSERT_NO_FATAL_FAILURE(start_until_stopped(long_to_move(), kVictim, op, OpStage::kMoving));
    kill_now(victim);
    expect_recovery(op == Op::kDispatch ? "moving rows of a dispatch" : "moving rows of a combine");
    if (HasFailure()) return;
  }
}

TEST_F(EngineKillPoints, WaitingForARankThatHasNotSubmitted) {
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    SCOPED_TRACE(name_of(op));
    start_ranks(fault_case(kRanks, 2), 4, op == Op::kDispatch ? 0 : 1);
    kill_in(kVictim, op, OpStage::kWaitReady);
    expect_recovery(op == Op::kDispatch ? "waiting for a rank to dispatch" : "waiting for a rank to combine");
    if (HasFailure()) return;
  }
}

TEST_F(EngineKillPoints, WaitingForAPeersRows) {
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    SCOPED_TRACE(name_of(op));
    const pid_t victim = engine(kVictim);
    const pid_t peer = engine(kHolder);
    const auto victim_waits = [&] { return pages_->shows(kVictim, op, OpStage::kWaitArrived); };
    bool waits = false;
    for (int tries = 0; tries < 10 && !waits; ++tries) {
      ASSERT_NO_FATAL_FAILURE(start_until_stopped(long_to_move(), kHolder, op, OpStage::kMoving));
      // The peer may have stopped just after its last row: then the victim gets through.
      waits = stop_when(
          victim, victim_waits, [] { return false; }, 2);
      if (!waits) send_signal(peer, SIGCONT);
    }
    ASSERT_TRUE(waits);
    kill_now(victim);
    send_signal(peer, SIGCONT);
    expect_recovery(op == Op::kDispatch ? "waiting for a peer's rows" : "waiting for a peer's pulls");
    if (HasFailure()) return;
  }
}

TEST_F(EngineKillPoints, Breaking) {
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    SCOPED_TRACE(name_of(op));
    start_ranks(fault_case(kRanks, 2), 4, op == Op::kDispatch ? 0 : 1);
    const pid_t holder = break_that_lasts(op);
    kill_in(kVictim, op, OpStage::kBreaking);
    send_signal(holder, SIGCONT);
    expect_recovery(op == Op::kDispatch ? "breaking, with a dispatch" : "breaking, with a combine");
    if (HasFailure()) return;
  }
}

// It has answered the break; the order to continue is under way to it.
TEST_F(EngineKillPoints, WithTheResumeUnread) {
  start_ranks(fault_case(kRanks, 2), 4, 1);
  const pid_t holder = break_that_lasts(Op::kCombine);
  // Its answer goes out in the round that showed the break, or in the next one.
  const std::uint64_t loops = pages_->of(kVictim).loops;
  ASSERT_TRUE(eventually(20, [&] { return pages_->of(kVictim).loops >= loops + 2; }));
  const pid_t victim = engine(kVictim);
  ASSERT_TRUE(stop_process(victim));
  send_signal(holder, SIGCONT);
  ASSERT_TRUE(eventually(20, [&] {
    return daemon_->log().find("event=\"group resumed\"") != std::string::npos;
  })) << "the supervisor has not resumed the group";
  kill_now(victim);
  expect_recovery("resume sent, not read");
}

TEST_F(EngineKillPoints, Idle) {
  must_resume_ = false;
  start_ranks(fault_case(kRanks, 2), 4, kNoHold);
  expect_all_ok(wait_all(ranks_, 60));
  for (std::uint32_t device = 0; device < kRanks; ++device) kill_now(engine(device));
  start_ranks(fault_case(kRanks, 2), 4, kNoHold);
  expect_recovery("idle");
}

// Killed again just forked, then on its way up, then as soon as its loop has run.
TEST_F(EngineKillPoints, AgainWhileItStarts) {
  start_ranks(fault_case(kRanks, 2), 4, 0);
  kill_in(kVictim, Op::kDispatch, OpStage::kWaitReady);
  pid_t pid = engine(kVictim);
  kill_now(pid);
  pid = engine(kVictim, pid);
  sleep_ms(8);
  kill_now(pid);
  pid = engine(kVictim, pid);
  const std::uint64_t loops = pages_->of(kVictim).loops;
  ASSERT_TRUE(eventually(20, [&] { return pages_->of(kVictim).loops != loops; }));
  kill_now(pid);
  expect_recovery("again and again while it starts");
}

TEST_F(EngineKillPoints, WhileAGroupStarts) {
  must_resume_ = false;
  const pid_t victim = engine(kVictim);
  ASSERT_TRUE(stop_process(victim));
  start_ranks(fault_case(kRanks, 2), 4, kNoHold);
  const std::size_t mapped = before_.processes[1 + kHolder].memfd_mappings;
  ASSERT_TRUE(eventually(20, [&] { return take_census(engine(kHolder)).memfd_mappings > mapped + kRanks; }))
      << "no other engine maps the group";
  kill_now(victim);
  expect_recovery("while a group starts");
}

TEST_F(EngineKillPoints, WhileASessionIsAdded) {
  const pid_t victim = engine(kVictim);
  ASSERT_TRUE(stop_process(victim));
  Shared<Gate> attached;
  RankProcess client([&]() -> std::string {
    const Session session(daemon_->socket(), daemon_->device(kVictim));
    attached->arrive();
    const Case c = fault_case(1, 2);
    const Group group(session, c.config("added", 0));
    return ScriptRunner(group, c, 0, {}).run().to_string();
  });
  ASSERT_TRUE(eventually(20, [&] { return attached->count == 1; }));
  kill_now(victim);
  const RankOutcome outcome = client.wait(40);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  expect_same_census(*daemon_, before_);
}

// Its client is dead and its rank has left; neither word is read.
TEST_F(EngineKillPoints, WhileASessionIsRemovedAndARankLeaves) {
  Shared<Stage> stage;
  const Case c = fault_case(2, 2);
  const auto join_and_wait = [&](const char* name, std::uint32_t rank) {
    const Session session(daemon_->socket(), daemon_->device(rank));
    Group group(session, c.config(name, rank));
    stage->holding.fetch_add(1);
    stage->go.wait_for(1);
    group = Group();  // for the victim's rank: asks an engine that can't answer
    stage->finished.arrive();
    return std::string();
  };
  RankProcess doomed([&] { return join_and_wait("killed", kVictim); });
  RankProcess peer_of_doomed([&] { return join_and_wait("killed", 1); });
  RankProcess leaver([&] { return join_and_wait("left", kVictim); });
  RankProcess peer_of_leaver([&] { return join_and_wait("left", 1); });
  ASSERT_TRUE(eventually(20, [&] { return stage->holding == 4; }));
  const pid_t victim = engine(kVictim);
  ASSERT_TRUE(stop_process(victim));
  doomed.kill(SIGKILL);
  doomed.wait(10);
  ASSERT_TRUE(eventually(20, [&] { return daemon_->log().find("how=\"died\"") != std::string::npos; }));
  stage->go.open();
  sleep_ms(50);
  EXPECT_LE(stage->finished.count, 2u) << "a rank has left though its own engine has not let go of it";
  kill_now(victim);
  for (RankProcess* process : {&peer_of_doomed, &leaver, &peer_of_leaver}) {
    const RankOutcome outcome = process->wait(20);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
  }
  expect_same_census(*daemon_, before_);
  expect_serves(*daemon_, kRanks, "killed");
}

}  // namespace
}  // namespace epd::test
