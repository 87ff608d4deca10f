// A rank is lost under the policy `degrade`: the others continue without it, bit for bit as if nobody had
// chosen its experts, and take it back when it returns.
#include "common/signal.h"
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <atomic>
#include <memory>

namespace epd::test {
namespace {

constexpr int kHangMs = 30000;
constexpr std::uint32_t kRanks = 4;

class DegradeFault : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!can_use_devices(GetParam())) GTEST_SKIP() << "no CUDA driver to be opened here";
    DaemonOptions options;
    options.devices = 3;  // ranks 0 and 3 share one
    use_devices(options, GetParam());
    options.settings = patient_settings();
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_ != nullptr && daemon_->running()) daemon_->stop();
  }
  // On host devices with sum domains of so many ranks: 1: each rank is one, which goes with it.
  static Case degrade_case(std::uint32_t depth, std::uint32_t sum_ranks) {
    Case c = fault_case(kRanks, depth);
    c.degrade = true;
    if (GetParam() == "host") c.sum_ranks = sum_ranks;
    return c;
  }
  std::unique_ptr<Daemon> daemon_;
};
INSTANTIATE_TEST_SUITE_P(Devices, DegradeFault, testing::Values("host", "cuda"),
                         [](const auto& tested) { return tested.param; });

struct Stage {
  Gate ready;
  Gate lost;
  Gate degraded;
  Gate joined;
  Gate finished;
  Gate seen;
  std::atomic<std::uint64_t> progress{0};
};

void only_these(const ScriptStats& stats, const std::set<std::string>& allowed) {
  for (const auto& [status, count] : stats.failures) RANK_CHECK(allowed.contains(status), stats.to_string());
}

TEST_P(DegradeFault, TheOthersGoOnWithoutALostRank) {
  const std::size_t memfds = settled_memfds(*daemon_);
  for (std::uint32_t turn = 0; turn < 3; ++turn) {
    SCOPED_TRACE("turn " + std::to_string(turn));
    Case c = degrade_case(1 + turn, 1 + turn);
    c.seed += turn;
    if (turn == 1) c.payload = EPD_PAYLOAD_FP8_CAST;
    const std::uint32_t victim = turn;  // 0 shares its device with a survivor
    Shared<Stage> stage;
    std::vector<RankProcess> ranks =
        start_group(*daemon_, c, "degrade", [&](const Group& group, std::uint32_t rank) -> std::string {
          ScriptOptions options;
          options.rounds = 150;
          options.order = static_cast<Order>(turn);
          options.recover = true;
          options.finished = &stage->finished;
          options.num_finishers = kRanks - 1;
          options.on_submit = [&](std::uint64_t) { stage->progress.fetch_add(1); };
          options.on_complete = [&](std::uint64_t completed) {
            if (rank == victim && completed == 100) sleep_ms(60000);  // it is not to get to its end
          };
          const ScriptStats stats = ScriptRunner(group, c, rank, options).run();
          only_these(stats, {"RANK_LOST"});
          RANK_CHECK(epd_group_active(group.get(), victim) == 0, "the lost rank counts as active");
          RANK_CHECK(epd_group_active(group.get(), rank) == 1, "this rank does not");
          RANK_CHECK(epd_group_active(group.get(), kRanks) == 0, "there is no such rank");
          return stats.to_string();
        });
    ASSERT_TRUE(eventually(30, [&] { return stage->progress > 40 + turn * 37; }));
    ranks[victim].kill(SIGKILL);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const RankOutcome outcome = ranks[rank].wait(60);
      if (rank == victim) continue;
      EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
      std::printf("rank %u: %s\n", rank, outcome.text.c_str());
    }
    if (HasFailure()) return;
  }
  EXPECT_TRUE(eventually(8, [&] { return memfds_held(*daemon_) == memfds; }))
      << "arenas are left: " << memfds_held(*daemon_) << ", before " << memfds;
}

// Rank 1 is lost between a dispatch and its combine: its rows count as zeros, and are counted as dropped.
std::string combine_after_loss(const Group& group, const Case& c, std::uint32_t rank, Stage& stage,
                               bool engine_dies) {
  const std::vector<Input> inputs = make_inputs(c, {0, 0});
  const epd_buffers_t buffers = group.buffers(0);
  fill_dispatch(c, buffers, inputs[rank]);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.num_tokens = inputs[rank].num_tokens;
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  epd_result_t result;
  epd_result_init(&result);
  must(group.dispatch(&args, &ticket, &handle), "dispatch");
  must(group.wait(ticket, kHangMs, &result), "dispatch");
  RANK_CHECK(result.num_dropped_selections == 0, "nothing is dropped yet");
  fill_combine(c, buffers, rank, {0, 0}, result.num_recv_rows);
  stage.ready.arrive();
  if (rank == 1) sleep_ms(60000);
  stage.lost.wait_for(1);

  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.handle = handle;
  combine.weighted = c.weighted ? 1 : 0;
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  bool heard = false;
  // An engine that dies as well may make two breaks of it, and the dispatch be due again: it had not heard
  // that its kernel had carried the dispatch out.
  for (std::uint64_t op = 1; op < 2; op = info.resume_op) {
    ticket = 0;
    const epd_status_t status =
        op == 0 ? group.dispatch(&args, &ticket, &handle) : group.combine(&combine, &ticket);
    RANK_CHECK(status == EPD_OK || epd_is_break(status) != 0, epd_last_error());
    const epd_ticket_t submitted = ticket;
    must(epd_group_advance(group.get(), &ticket, kHangMs, &result, &info), "advance");
    if (submitted != 0) group.ended(submitted);
    const epd_status_t told = submitted != 0 ? result.status : status;
    RANK_CHECK(told == EPD_OK || told == EPD_RANK_LOST || (engine_dies && told == EPD_ENGINE_RESTARTED),
               epd_status_name(told));
    heard = heard || (told == EPD_RANK_LOST && (submitted == 0 || result.failed_rank == 1));
    RANK_CHECK(info.resume_op >= 1 || engine_dies, "operation " + std::to_string(info.resume_op));
    if (op == 0 && info.resume_op == 1) {
      combine.handle = handle;
      fill_combine(c, buffers, rank, {0, 0}, result.num_recv_rows);
    }
  }
  RANK_CHECK(heard || engine_dies, "nobody said that the rank is lost");
  RANK_CHECK(info.epoch >= 2 && info.num_active_ranks == kRanks - 1,
             "epoch " + std::to_string(info.epoch) + ", " + std::to_string(info.num_active_ranks) + " ranks");
  const std::string text = check_combine(c, buffers, inputs, rank, {0, 0}, {1});
  RANK_CHECK(text.empty(), text);
  const std::uint32_t dropped = selections_of(c, inputs[rank], {1});
  RANK_CHECK(result.num_dropped_selections == dropped, std::to_string(result.num_dropped_selections));
  stage.finished.arrive();
  stage.finished.wait_for(kRanks - 1);
  return std::to_string(dropped) + " selections dropped";
}

TEST_P(DegradeFault, ACombineWhoseDispatchCameBeforeTheLoss) {
  for (const bool engine_dies : {false, true}) {
    SCOPED_TRACE(engine_dies ? "and an engine dies as well" : "");
    Case c = degrade_case(2, engine_dies ? 2 : 1);
    c.weighted = engine_dies;
    Shared<Stage> stage;
    std::vector<RankProcess> ranks =
        start_group(*daemon_, c, "between", [&](const Group& group, std::uint32_t rank) -> std::string {
          return combine_after_loss(group, c, rank, *stage, engine_dies);
        });
    ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == kRanks; }));
    ranks[1].kill(SIGKILL);
    // Its successor reads the routing of before the loss from the arena.
    if (engine_dies) send_signal(daemon_->engine(0), SIGKILL);
    ranks[1].wait(10);
    stage->lost.open();
    for (const std::uint32_t rank : {0u, 2u, 3u}) {
      const RankOutcome outcome = ranks[rank].wait(40);
      EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
      std::printf("rank %u: %s\n", rank, outcome.text.c_str());
    }
    if (HasFailure()) return;
  }
}

TEST_P(DegradeFault, ALostRankRejoinsAndAllAreWholeAgain) {
  for (std::uint32_t turn = 0; turn < 3; ++turn) {
    SCOPED_TRACE("turn " + std::to_string(turn));
    Case c = degrade_case(1 + turn, 1 + turn);
    c.seed += 10 + turn;
    constexpr std::uint64_t kLoss = 30;     // operations completed by each when the rank goes
    constexpr std::uint64_t kRejoin = 120;  // and when it must be back
    Shared<Stage> stage;
    const auto options = [&](std::uint32_t finishers) {
      ScriptOptions o;
      o.rounds = 120;
      o.order = static_cast<Order>(turn);
      o.recover = true;
      o.finished = &stage->finished;
      o.num_finishers = finishers;
      return o;
    };
    std::vector<RankProcess> ranks =
        start_group(*daemon_, c, "rejoin", [&](const Group& group, std::uint32_t rank) -> std::string {
          ScriptOptions o = options(kRanks);
          o.on_complete = [&, rank](std::uint64_t completed) {
            if (completed == kLoss) stage->ready.arrive();
            if (completed == kLoss && rank == 2) sleep_ms(60000);  // until it is killed
            if (completed == kRejoin - 20) stage->degraded.arrive();
            if (completed == kRejoin) stage->joined.wait_for(1);
          };
          const ScriptStats stats = ScriptRunner(group, c, rank, o).run();
          only_these(stats, {"RANK_LOST", "ABORTED", "ENGINE_RESTARTED"});
          RANK_CHECK(stats.resumes >= 2, stats.to_string());
          RANK_CHECK(epd_group_active(group.get(), 2) == 1, "the rank is back");
          stage->seen.meet(kRanks);  // nobody leaves before
          return stats.to_string();
        });
    ASSERT_TRUE(eventually(30, [&] { return stage->ready.count == kRanks; }));
    ranks[2].kill(SIGKILL);
    ranks[2].wait(10);
    ASSERT_TRUE(eventually(60, [&] { return stage->degraded.count == kRanks - 1; }));
    if (turn == 2) send_signal(daemon_->engine(0), SIGKILL);  // its successor must know who is masked
    // On another device than before, in the second turn: one that serves the group already.
    RankProcess newcomer([&]() -> std::string {
      const Session session(daemon_->socket(), daemon_->device(turn == 1 ? 0 : 2));
      epd_group_config_t config = c.config("rejoin", 2);
      if (turn == 0) config.rank = -1;
      const Group group(session, config);
      RANK_CHECK(epd_group_rank(group.get()) == 2, "the lowest lost rank");
      stage->joined.open();
      const ScriptStats stats = ScriptRunner(group, c, 2, options(kRanks)).run();
      only_these(stats, {"ENGINE_RESTARTED"});
      RANK_CHECK(stats.completed > 20, stats.to_string());
      stage->seen.meet(kRanks);
      return stats.to_string();
    });
    for (const std::uint32_t rank : {0u, 1u, 3u}) {
      const RankOutcome outcome = ranks[rank].wait(60);
      EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
      std::printf("rank %u: %s\n", rank, outcome.text.c_str());
    }
    const RankOutcome outcome = newcomer.wait(60);
    EXPECT_TRUE(outcome.ok) << "the newcomer " << outcome.to_string();
    std::printf("newcomer: %s\n", outcome.text.c_str());
    if (HasFailure()) return;
  }
}

// Rank 1 lives and submits nothing more. The others wait for it until one deadline, and never again. When all
// ask for it, it comes back.
TEST_P(DegradeFault, ARankThatMissesADeadlineIsLostUntilAllTakeItBack) {
  Case c = degrade_case(2, 1);
  c.late = true;
  Shared<Stage> stage;
  std::vector<RankProcess> ranks =
      start_group(*daemon_, c, "late", [&](const Group& group, std::uint32_t rank) -> std::string {
        ScriptOptions options;
        options.rounds = 60;
        options.recover = true;
        options.timeout_ms = 3000;
        options.finished = &stage->finished;
        options.num_finishers = kRanks - 1;
        options.on_complete = [&](std::uint64_t completed) {
          if (rank == 1 && completed == 40) stage->finished.wait_for(kRanks - 1);
        };
        if (rank == 1) options.ends = {EPD_RANK_LOST};
        const ScriptStats stats = ScriptRunner(group, c, rank, options).run();
        if (rank == 1) {
          epd_resume_info_t info;
          epd_resume_info_init(&info);
          RANK_CHECK(epd_group_resume(group.get(), kHangMs, &info) == EPD_RANK_LOST,
                     "a lost rank has resumed");
          must_say("rank 1 is late");
        } else {
          only_these(stats, {"RANK_LOST", "DEADLINE_EXCEEDED"});
          RANK_CHECK(stats.resumes == 1, stats.to_string());
          RANK_CHECK(epd_group_active(group.get(), 1) == 0, "the late rank counts as active");
        }
        stage->seen.meet(kRanks);
        if (rank != 1)
          RANK_CHECK(epd_group_restore(group.get(), 1, nullptr) == EPD_DEADLINE_EXCEEDED, epd_last_error());
        stage->joined.meet(kRanks);  // until then nobody else has asked
        ScriptOptions again;
        const void* const x = group.buffers(0).x;
        again.first_op = group.restore().resume_op;
        again.recover = true;  // else a degraded group's script does not know where it is, and does nothing
        RANK_CHECK(group.buffers(0).x == x, "on host devices addresses stay");
        RANK_CHECK(epd_group_active(group.get(), 1) == 1, "the late rank is back");
        const ScriptStats whole = ScriptRunner(group, c, rank, again).run();
        RANK_CHECK(whole.completed > 0 && whole.failures.empty() && whole.resumes == 0, whole.to_string());
        stage->degraded.meet(kRanks);  // nobody leaves before
        return stats.to_string() + ", then " + whole.to_string();
      });
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const RankOutcome outcome = ranks[rank].wait(60);
    EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
    std::printf("rank %u: %s\n", rank, outcome.text.c_str());
  }
}

}  // namespace
}  // namespace epd::test
