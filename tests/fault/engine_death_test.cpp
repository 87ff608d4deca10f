// An engine dies: operations in flight end with ENGINE_RESTARTED or are right, arenas and routing survive,
// and the clients continue without restarting.
#include "common/signal.h"
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

namespace epd::test {
namespace {

constexpr int kHangMs = 30000;

class EngineDeath : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!can_use_devices(GetParam())) GTEST_SKIP() << "no CUDA driver to be opened here";
    start(4, patient_settings());
  }
  void start(std::uint32_t devices, std::vector<std::pair<std::string, std::string>> settings) {
    if (daemon_ != nullptr) daemon_->stop();
    DaemonOptions options;
    options.devices = devices;
    use_devices(options, GetParam());
    options.settings = std::move(settings);
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_ != nullptr && daemon_->running()) daemon_->stop();
  }
  // Kills the engine of a device and returns once it is dead.
  void kill_engine(std::uint32_t device, int number = SIGKILL) {
    pid_t pid = -1;
    ASSERT_TRUE(eventually(20, [&] { return (pid = daemon_->engine(device)) > 0; }))
        << "no engine on " << device;
    ASSERT_EQ(send_signal(pid, number), 0);
    if (number == SIGKILL) {
      ASSERT_TRUE(eventually(10, [&] { return !is_running(pid); }));
    }
  }
  // For the present groups, as far as the engines know.
  std::uint64_t completed_operations() const {
    std::uint64_t sum = 0;
    const nlohmann::json answer = nlohmann::json::parse(daemon_->epctl({"stats", "--json"}).out);
    for (const nlohmann::json& group : answer["groups"])
      sum += group["statistics"]["completed"].get<std::uint64_t>();
    return sum;
  }
  // Ranks of a group that run a script, on the devices from `first` on.
  std::vector<RankProcess> run_script(const Case& c, const std::string& group, const ScriptOptions& options,
                                      std::uint32_t first = 0) const {
    std::vector<RankProcess> ranks = start_ranks(c.num_ranks, [&](std::uint32_t rank) {
      return run_case(daemon_->socket(), daemon_->device(first + rank), group, c, rank, options);
    });
    return ranks;
  }
  std::unique_ptr<Daemon> daemon_;
};
INSTANTIATE_TEST_SUITE_P(Devices, EngineDeath, testing::Values("host", "cuda"),
                         [](const auto& tested) { return tested.param; });

struct Stage {
  Gate ready;
  Gate go;
  Gate finished;
  std::atomic<double> killed_at{0};
  std::atomic<double> recovered_at{0};
  std::atomic<double> longest_pause{0};
  std::atomic<std::uint64_t> progress{0};
  std::atomic<bool> stop{false};
};

epd_ticket_t dispatch(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t round,
                      epd_handle_t* handle) {
  epd_ticket_t ticket = 0;
  must(submit_dispatch(group, c, rank, round, kHangMs, &ticket, handle), "dispatch");
  return ticket;
}

void finish_dispatch(const Group& group, const Case& c, std::uint32_t rank, std::uint64_t round,
                     epd_ticket_t ticket) {
  epd_result_t result;
  epd_result_init(&result);
  must(group.wait(ticket, kHangMs, &result), "dispatch");
  const epd_buffers_t buffers = group.buffers(static_cast<std::uint32_t>(round % c.depth));
  const std::string text = check_dispatch(c, buffers, make_inputs(c, round), rank, result, nullptr);
  RANK_CHECK(text.empty(), text);
}

// The first combine after a dispatch of before the engine died.
void combine_after_restart(const Group& group, const Case& c, epd_handle_t handle) {
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.handle = handle;
  args.weighted = c.weighted ? 1 : 0;
  args.timeout_ms = kHangMs;
  epd_ticket_t ticket = 0;
  epd_status_t status = group.combine(&args, &ticket);
  if (status == EPD_OK) status = group.wait(ticket, kHangMs);
  RANK_CHECK(status == EPD_OK || status == EPD_ENGINE_RESTARTED,
             std::string(epd_status_name(status)) + ": " + epd_last_error());
  if (status == EPD_OK) return;
  const std::uint64_t resume_op = resume(group, kHangMs);
  RANK_CHECK(resume_op == 1, "the dispatch is done, the combine is not: " + std::to_string(resume_op));
  must(group.combine(&args, &ticket), "combine");
  must(group.wait(ticket, kHangMs), "combine");
}

TEST_P(EngineDeath, ArenasAndRoutingSurvive) {
  const Case c = fault_case(3, 2);
  Shared<Stage> stage;
  std::vector<RankProcess> ranks =
      start_group(*daemon_, c, "survive", [&](const Group& group, std::uint32_t rank) -> std::string {
        epd_handle_t handle = 0;
        finish_dispatch(group, c, rank, 0, dispatch(group, c, rank, 0, &handle));
        const epd_buffers_t buffers = group.buffers(0);
        const auto rows = static_cast<std::uint32_t>(buffers.rank_offsets[3]);
        const std::uint64_t received = digest_dispatch(c, buffers, rows);
        fill_combine(c, buffers, rank, 0, rows);
        static_cast<std::uint64_t*>(group.buffers(1).x)[rank] = 0x1234567890abcdefu;
        stage->ready.arrive();
        stage->go.wait_for(1);
        RANK_CHECK(digest_dispatch(c, buffers, rows) == received, "received rows changed");
        combine_after_restart(group, c, handle);
        const std::string text = check_combine(c, buffers, make_inputs(c, 0), rank, 0);
        RANK_CHECK(text.empty(), text);
        RANK_CHECK(static_cast<std::uint64_t*>(group.buffers(1).x)[rank] == 0x1234567890abcdefu, "x changed");
        RANK_CHECK(digest_dispatch(c, buffers, rows) == received, "received rows changed");
        return "";
      });
  ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == 3; }));
  // On GPUs clients hear of an end before their engine does.
  ASSERT_TRUE(eventually(30, [&] { return completed_operations() == 3; }));
  kill_engine(0);
  kill_engine(2);
  stage->go.open();
  expect_all_ok(wait_all(ranks, 60));
}

// A storm of random cases while engines die one after another.
TEST_P(EngineDeath, AgainAndAgainUnderLoad) {
  std::mt19937 random(4711);
  for (std::uint32_t turn = 0; turn < 4; ++turn) {
    Case c = random_case(700 + turn, 4 + turn % 2);  // five ranks: two on one device
    c.depth = 1 + turn;
    c.max_tokens = std::max(c.max_tokens, 4u);
    c.hidden = std::min(c.hidden, 512u);
    c.max_recv_rows = 0;  // the room of a random case is for its first rounds
    if (GetParam() != "host") c.sum_ranks = 0;
    SCOPED_TRACE(c.describe());
    const std::string name = "again-" + std::to_string(turn);
    Shared<Stage> stage;
    std::vector<RankProcess> ranks =
        start_group(*daemon_, c, name, [&](const Group& group, std::uint32_t rank) -> std::string {
          ScriptOptions options;
          options.rounds = 400;
          options.order = static_cast<Order>(turn % 3);
          options.recover = true;
          options.finished = &stage->finished;
          double last_done = 0;
          options.on_complete = [&](std::uint64_t) {
            stage->progress.fetch_add(1);
            if (stage->recovered_at < stage->killed_at) stage->recovered_at = now_s();
            if (rank != 0) return;
            const double pause = last_done == 0 ? 0 : now_s() - last_done;
            last_done = now_s();
            if (pause > stage->longest_pause) stage->longest_pause = pause;
          };
          const ScriptStats stats = ScriptRunner(group, c, rank, options).run();
          for (const auto& [status, count] : stats.failures)
            RANK_CHECK(status == "ENGINE_RESTARTED", stats.to_string());
          return stats.to_string();
        });
    const auto over = [&] { return stage->finished.count == c.num_ranks; };
    int kills = 0;
    for (; kills < 5 && !over() && !HasFailure(); ++kills) {
      const std::uint64_t enough = stage->progress + 20 + random() % 60;
      EXPECT_TRUE(eventually(20, [&] { return stage->progress > enough || over(); }))
          << "no progress before kill " << kills;
      kill_engine(random() % 4);
      const double killed = now_s();
      stage->killed_at = killed;
      EXPECT_TRUE(eventually(20, [&] { return stage->recovered_at > killed || over(); }))
          << "no operation completed after kill " << kills;
    }
    const auto outcomes = wait_all(ranks, HasFailure() ? 5 : 90);
    expect_all_ok(outcomes);
    std::printf("%d engines killed, longest pause between completions on rank 0: %.1f ms; %s\n", kills,
                stage->longest_pause * 1000, outcomes[0].text.c_str());
    if (HasFailure()) return;
  }
}

TEST_P(EngineDeath, AllEnginesAtOnce) {
  Shared<Stage> stage;
  ScriptOptions options;
  options.rounds = 200;
  options.recover = true;
  options.finished = &stage->finished;
  options.on_complete = [&](std::uint64_t) { stage->progress.fetch_add(1); };
  auto ranks = run_script(fault_case(4, 3), "all", options);
  ASSERT_TRUE(eventually(30, [&] { return stage->progress > 40; }));
  for (const pid_t engine : daemon_->engines()) send_signal(engine, SIGKILL);
  expect_all_ok(wait_all(ranks, 90));
}

TEST_P(EngineDeath, ABystanderOnAnotherDeviceNoticesNothing) {
  Shared<Stage> stage;
  ScriptOptions options;
  options.rounds = 400;
  options.on_complete = [&](std::uint64_t) { stage->progress.fetch_add(1); };
  auto ranks = run_script(fault_case(2, 2), "bystander", options, 2);
  ASSERT_TRUE(eventually(30, [&] { return stage->progress > 10; }));
  for (int i = 0; i < 4; ++i) {
    kill_engine(static_cast<std::uint32_t>(i % 2));
    sleep_ms(30);
  }
  expect_all_ok(wait_all(ranks, 90));
}

TEST_P(EngineDeath, AnEngineThatHangsIsReplaced) {
  auto settings = patient_settings();
  settings.emplace_back("timeouts.engine_watchdog_ms", "2000");
  start(2, settings);
  Shared<Stage> stage;
  ScriptOptions options;
  options.rounds = 2000;
  options.recover = true;
  options.finished = &stage->finished;
  options.timeout_ms = 60000;
  options.on_complete = [&](std::uint64_t) { stage->progress.fetch_add(1); };
  auto ranks = run_script(fault_case(2, 2), "hangs", options);
  ASSERT_TRUE(eventually(30, [&] { return stage->progress > 10; }));
  const double start_s = now_s();
  const pid_t before = daemon_->engine(1);
  ASSERT_TRUE(hang_process(before));
  EXPECT_TRUE(eventually(20, [&] { return daemon_->engine(1) > 0 && daemon_->engine(1) != before; }));
  std::printf("a hung engine was replaced after %.1f s\n", now_s() - start_s);
  expect_all_ok(wait_all(ranks, 90));
}

TEST_P(EngineDeath, AnEngineThatDiesTooOftenIsGivenUp) {
  start(2, {{"engine.max_restarts_per_minute", "2"}, {"engine.restart_backoff_max_ms", "20"}});
  Shared<Stage> stage;
  RankProcess client([&]() -> std::string {
    const Session session(daemon_->socket(), daemon_->device(0));
    stage->ready.arrive();
    RANK_CHECK(eventually(30, [&] { return epd_session_check(session.get()) != EPD_OK; }),
               "the session ends");
    std::string text = epd_last_error();
    RANK_CHECK(text.find(daemon_->device(0)) != std::string::npos, text);
    epd_attach_options_t options;
    epd_attach_options_init(&options);
    options.socket_path = daemon_->socket().c_str();
    const std::string device = daemon_->device(0);
    options.device = device.c_str();
    epd_session_t* other = nullptr;
    RANK_CHECK(epd_session_attach(&options, &other) != EPD_OK, "nobody can attach to it");
    must_say(daemon_->device(0));
    return text;
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == 1; }));
  for (int i = 0; i < 4; ++i) {
    pid_t pid = -1;
    bool given_up = false;
    EXPECT_TRUE(eventually(20, [&] {
      given_up = daemon_->log().find("event=\"device failed\"") != std::string::npos;
      return given_up || (pid = daemon_->engine(0)) > 0;
    }));
    if (given_up || pid <= 0) break;
    send_signal(pid, SIGKILL);
    eventually(5, [&] { return !is_running(pid); });
  }
  const RankOutcome outcome = client.wait(40);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  const Case c = fault_case(1);
  expect_all_ok(run_ranks(1, 30, [&](std::uint32_t) {
    return run_case(daemon_->socket(), daemon_->device(1), "other-device", c, 0, {});
  }));
}

// `pkill -HUP epd`, meant to reload the configuration, killed all engines; other signals also did.
TEST_P(EngineDeath, ASignalThatWasSentToEveryEpdKilledTheEngines) {
  const std::vector<pid_t> engines = daemon_->engine_of_each_device();
  for (const pid_t engine : engines) {
    ASSERT_GT(engine, 0);
    for (const int number : {SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM})
      ASSERT_EQ(send_signal(engine, number), 0);
  }
  expect_serves(*daemon_, 2, "strays");
  EXPECT_EQ(daemon_->engine_of_each_device(), engines) << daemon_->epctl({"devices"}).out;
}

}  // namespace
}  // namespace epd::test
