// A process ends in the middle of its kernel. Under MPS that takes along every process on its GPU: the engine
// too, which comes back, while ranks on other GPUs continue. Without a GPU the fake driver's fault files
// stand for MPS.
#include "gpu_fault_fixture.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace epd::test {
namespace {

// Every result of every rank is compared, before, without and with the victim's successor.
TEST_F(GpuFault, ADegradedGroupGoesOnAndTakesTheRankBack) {
  const Case c = gpu_case(true);
  constexpr std::uint64_t kLoss = 30;     // operations completed by each when the victim dies
  constexpr std::uint64_t kRejoin = 120;  // and when its successor must be in
  Shared<Stage> stage;
  const auto options = [&] {
    ScriptOptions o;
    o.rounds = 120;
    o.order = Order::kInTurn;
    o.recover = true;
    o.finished = &stage->finished;
    return o;
  };
  std::vector<RankProcess> ranks = start_ranks(kFaultRanks, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon().socket(), device_of(rank));
    const Keepsake keepsake(session, rank);
    const Group group(session, c.config("degrade", rank));
    RankTimes& times = stage->times[rank];
    ScriptOptions o = options();
    o.on_failure = [&](epd_status_t) { set_first(times.told); };
    o.on_complete = [&](std::uint64_t completed) {
      if (completed == kLoss) {
        if (rank == kVictim) occupy_its_gpu();
        stage->ready.arrive();
        if (rank == kVictim) sleep_ms(60000);  // until it is killed
      }
      if (times.told != 0) set_first(times.again);
      if (completed == kRejoin - 20) stage->degraded.arrive();
      if (completed == kRejoin) stage->joined.wait_for(1);
      if (times.again != 0 && epd_group_active(group.get(), kVictim) == 1) set_first(times.whole);
    };
    const ScriptStats stats = ScriptRunner(group, c, rank, o).run();
    only_these(stats.failures, {"RANK_LOST", "ENGINE_RESTARTED", "ABORTED"});
    RANK_CHECK(times.told != 0 && times.whole != 0, stats.to_string());
    keepsake.check();
    stage->seen.meet(kFaultRanks);  // nobody leaves before
    return stats.to_string();
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->ready.count == kFaultRanks; }));
  const double killed = gpus_->kill_in_a_kernel(ranks[kVictim], victims_gpu());
  RankProcess newcomer = successor(*stage, [&](const Session& session) -> std::string {
    const Group group(session, c.config("degrade", kVictim));
    stage->joined.open();
    const ScriptStats stats = ScriptRunner(group, c, kVictim, options()).run();
    only_these(stats.failures, {"ENGINE_RESTARTED"});
    RANK_CHECK(stats.completed > 20, stats.to_string());
    stage->seen.meet(kFaultRanks);
    return stats.to_string();
  });
  expect_all_end_well(ranks, newcomer);
  print_times("degrade", killed, *stage);
  gpus_->expect_only_this_engine_died(victims_gpu());
}

TEST_F(GpuFault, AGroupThatFailsFastEndsAndTheNextOneForms) {
  const Case c = gpu_case(false);
  Shared<Stage> stage;
  const auto next_group = [&](const Session& session, std::uint32_t rank) {
    const Group group(session, c.config("next", rank));
    ScriptOptions o;
    o.rounds = 10;
    o.on_complete = [&](std::uint64_t) { set_first(stage->times[rank].whole); };
    return ScriptRunner(group, c, rank, o).run().to_string();
  };
  std::vector<RankProcess> ranks = start_ranks(kFaultRanks, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon().socket(), device_of(rank));
    const Keepsake keepsake(session, rank);
    {
      const Group group(session, c.config("first", rank));
      ScriptOptions o;
      o.rounds = 1000;
      o.order = Order::kInTurn;
      o.recover = true;  // an engine that dies first makes a break of its own
      o.end = EPD_RANK_LOST;
      o.on_failure = [&](epd_status_t) { set_first(stage->times[rank].told); };
      o.on_complete = [&](std::uint64_t completed) {
        if (completed != 30) return;
        if (rank == kVictim) occupy_its_gpu();
        stage->ready.arrive();
        if (rank == kVictim) sleep_ms(60000);
      };
      const ScriptStats stats = ScriptRunner(group, c, rank, o).run();
      only_these(stats.failures, {"RANK_LOST", "ENGINE_RESTARTED"});
      RANK_CHECK(stats.completed < 2 * std::uint64_t{o.rounds}, "nothing but RANK_LOST ends it before");
    }
    keepsake.check();
    return next_group(session, rank);
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->ready.count == kFaultRanks; }));
  const double killed = gpus_->kill_in_a_kernel(ranks[kVictim], victims_gpu());
  RankProcess newcomer =
      successor(*stage, [&](const Session& session) { return next_group(session, kVictim); });
  expect_all_end_well(ranks, newcomer);
  print_times("fail_fast", killed, *stage);
  gpus_->expect_only_this_engine_died(victims_gpu());
}

// The driver takes almost half a second to end a process that has used a GPU. An engine says its last word
// before, so the others do not wait for that.
TEST_F(GpuFault, TheOthersDoNotWaitForTheEndOfTheEnginesProcess) {
  const Case c = gpu_case(true);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(kFaultRanks, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon().socket(), device_of(rank));
    const Group group(session, c.config("degrade", rank));
    ScriptOptions o;
    o.rounds = 60;
    o.order = Order::kInTurn;
    o.recover = true;
    o.finished = &stage->finished;
    o.num_finishers = kFaultRanks - 1;
    o.on_complete = [&](std::uint64_t completed) {
      if (completed != 30) return;
      if (rank == kVictim) occupy_its_gpu();
      stage->ready.arrive();
      if (rank == kVictim) sleep_ms(60000);
    };
    const ScriptStats stats = ScriptRunner(group, c, rank, o).run();
    only_these(stats.failures, {"RANK_LOST", "ENGINE_RESTARTED"});
    RANK_CHECK(epd_group_active(group.get(), kVictim) == 0, "the rank is lost");
    return stats.to_string();
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->ready.count == kFaultRanks; }));
  HeldExit engine(daemon().engine(victims_gpu()));
  if (!engine.works()) GTEST_SKIP() << "may not trace here";
  gpus_->strike(ranks[kVictim].pid(), victims_gpu());
  for (std::uint32_t rank = 0; rank < kFaultRanks; ++rank) {
    if (rank == kVictim) continue;
    const RankOutcome outcome = ranks[rank].wait(60);
    EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
  }
  EXPECT_TRUE(eventually(20, [&] { return engine.reached(); })) << "the engine has not noticed";
  EXPECT_EQ(daemon().log().find("engine died"), std::string::npos) << "its process is still held";
  gpus_->recover(victims_gpu());
}

// An engine with nothing in flight must notice as well: MPS takes nobody new before it has gone.
TEST_F(OneGpuFault, AnEngineWithNothingToDoComesBackToo) {
  Shared<Stage> stage;
  RankProcess client([&]() -> std::string {
    const Session session(daemon().socket(), device_of(kVictim));
    occupy_its_gpu();
    stage->ready.arrive();
    sleep_ms(60000);
    return "";
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->ready.count == 1; }));
  sleep_ms(50);
  const double killed = gpus_->kill_in_a_kernel(client, victims_gpu());
  RankProcess next = successor(*stage, [&](const Session& session) -> std::string {
    const Group group(session, small_config("after", 0, 1));
    epd_ticket_t ticket = 0;
    must(epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket), "noop");
    must(group.wait(ticket, 30000), "noop");
    return std::to_string((now_s() - killed) * 1000);
  });
  const RankOutcome outcome = next.wait(40);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  std::printf("idle engine: the first operation of the next client %s ms after the kill\n",
              outcome.text.c_str());
  gpus_->expect_only_this_engine_died(victims_gpu());
}

// Evicted in the middle of its kernel, and killed then: its work has been terminated, so nobody else is hurt.
TEST_F(OneGpuFault, AnEvictedClientIsTerminatedFirst) {
  if (!gpus_->can_terminate()) GTEST_SKIP() << "no nvidia-cuda-mps-control to be asked here";
  Shared<Stage> stage;
  std::vector<RankProcess> clients;
  for (const bool victim : {true, false}) {
    clients.emplace_back([&, victim]() -> std::string {
      const Session session(daemon().socket(), device_of(kVictim));
      const Group group(session, small_config(victim ? "evicted" : "bystander", 0, 1));
      if (victim) {
        occupy_its_gpu();
        stage->ready.arrive();
        sleep_ms(60000);
      }
      stage->ready.arrive();
      for (std::uint32_t i = 0; stage->finished.count == 0 || i < 100; ++i) {
        epd_ticket_t ticket = 0;
        must(epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket), "the bystander's noop");
        must(group.wait(ticket, 30000), "the bystander's noop");
        std::vector<std::byte> slot(group.slot_bytes());
        copy_from_gpu(group.gpu(), slot.data(), group.slot_on_gpu(0), slot.size());  // its own context lives
      }
      return "";
    });
  }
  ASSERT_TRUE(eventually(60, [&] { return stage->ready.count == 2; }));
  sleep_ms(50);
  const pid_t engine = daemon().engine(victims_gpu());
  gpus_->list_clients({daemon().engine(victims_gpu()), clients[0].pid(), clients[1].pid()});
  const std::string session = gpus_->session_of(clients[0].pid());
  const double asked = now_s();
  const CommandResult evicted = daemon().epctl({"evict", "session", session, "--reason", "test"});
  EXPECT_EQ(evicted.exit_code, 0) << evicted.err;
  ASSERT_TRUE(eventually(20, [&] { return gpus_->session_of(clients[0].pid()).empty(); }));
  std::printf("evicted within %.1f ms\n", (now_s() - asked) * 1000);
  std::string log;
  const auto place = [&](const char* text) { return log.find(text); };
  ASSERT_TRUE(eventually(20, [&] {
    log = daemon().log();
    return place("work on the GPU terminated by MPS") != std::string::npos &&
           place("evicted by operator: test") != std::string::npos;
  }));
  EXPECT_LT(place("work on the GPU terminated by MPS"), place("evicted by operator: test"))
      << "first MPS, then Goodbye";
  EXPECT_TRUE(gpus_->was_terminated(clients[0].pid()));
  clients[0].kill(SIGKILL);
  clients[0].wait(10);
  sleep_ms(300);
  stage->finished.open();
  const RankOutcome outcome = clients[1].wait(40);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  EXPECT_EQ(daemon().engine(victims_gpu()), engine) << "the engine was taken along";
}

// An engine that hangs is killed, but first MPS is asked; its client, in the middle of a kernel, keeps its
// context.
TEST_F(OneGpuFault, AnEngineThatHangsIsTerminatedFirst) {
  if (!gpus_->can_terminate()) GTEST_SKIP() << "no nvidia-cuda-mps-control to be asked here";
  start({{"timeouts.engine_watchdog_ms", "2000"}}, 1);
  Shared<Stage> stage;
  RankProcess client([&]() -> std::string {
    const Session session(daemon().socket(), device_of(kVictim));
    const Group group(session, small_config("hangs", 0, 1));
    occupy_its_gpu(12);  // past the kill, and not for ever: copies wait for it
    stage->ready.arrive();
    stage->joined.wait_for(1);
    const Keepsake keepsake(session, 0);
    keepsake.check();
    epd_ticket_t ticket = 0;
    resume(group, 30000);
    must(epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket), "noop");
    must(group.wait(ticket, 30000), "noop");
    return "";
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->ready.count == 1; }));
  const pid_t engine = daemon().engine(victims_gpu());
  gpus_->list_clients({engine, client.pid()});
  ASSERT_TRUE(hang_process(engine));
  EXPECT_TRUE(eventually(30, [&] {
    return daemon().engine(victims_gpu()) > 0 && daemon().engine(victims_gpu()) != engine &&
           all_devices_answer(daemon().socket(), "cuda", 1, nullptr);
  }));
  EXPECT_TRUE(eventually(20, [&] { return gpus_->was_terminated(engine); }));
  stage->joined.open();
  const RankOutcome outcome = client.wait(40);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
}

}  // namespace
}  // namespace epd::test
