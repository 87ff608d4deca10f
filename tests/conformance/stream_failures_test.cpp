// Streams that continue after any death, and rounds that continue after it.
#include "common/signal.h"
#include "stream_rounds.h"
#include "support/rank_bodies.h"

#include <signal.h>
#include <unistd.h>
#include <atomic>
#include <memory>

namespace epd::test {
namespace {

class StreamFailures : public StreamConformance {};
INSTANTIATE_TEST_SUITE_P(Devices, StreamFailures,
                         testing::ValuesIn(kinds_here({{"cuda", "cuda_by_kernel", "cuda_by_event"},
                                                       {"cuda_mixed"}})),
                         [](const auto& tested) { return tested.param; });

// A rank that had nothing in flight may not have heard of the break yet.
void resume_past(const Group& group, std::uint64_t epoch, std::uint64_t resume_op) {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  const bool resumed = eventually(60, [&] {
    must(epd_group_resume(group.get(), 60000, &info), "resume");
    return info.epoch > epoch;
  });
  RANK_CHECK(resumed, "still in epoch " + std::to_string(epoch));
  RANK_CHECK(info.resume_op == resume_op, std::to_string(info.resume_op));
}

// Two rounds that succeed, two of rank 0's that nobody answers and that end with `status` on all tickets, and
// four more after them. `waiting` opens when rank 0's stream waits; rank 1 continues when it has seen the
// end.
void break_and_go_on(const Case& c, const Group& group, std::uint32_t rank, std::uint32_t timeout_ms,
                     epd_status_t status, Gate& waiting, Gate& failed) {
  Rounds rounds(group, c, rank, 8);
  const std::uint64_t epoch = epoch_of(group);
  for (std::uint64_t i = 0; i < 2; ++i) rounds.submit(i);
  rounds.must_finish();
  rounds.check_all();
  waiting.meet(c.num_ranks);
  if (rank == 0) {
    for (std::uint64_t i = 2; i < 4; ++i) rounds.submit(i, timeout_ms);
    waiting.arrive();
    rounds.must_finish();
    rounds.all_must_fail(status);
    failed.arrive();
  } else {
    failed.wait_for(1);
  }
  resume_past(group, epoch, 4);
  for (std::uint64_t i = 2; i < 6; ++i) rounds.submit(i);
  rounds.must_finish();
  rounds.check_all();
}

TEST_P(StreamFailures, APeerThatDoesNotComeHoldsAStreamUntilTheDeadline) {
  const Case c = stream_case(2, 1);
  Shared<Gate> waiting;
  Shared<Gate> failed;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    break_and_go_on(c, group, rank, 1000, EPD_DEADLINE_EXCEEDED, *waiting, *failed);
  });
}

TEST_P(StreamFailures, AnEngineThatIsKilledHoldsNoStream) {
  for (const std::uint32_t victim : {0u, 1u}) {
    SCOPED_TRACE("the engine of rank " + std::to_string(victim));
    const Case c = stream_case(2, 1);
    const std::string name = group_name();
    Shared<Gate> waiting;
    Shared<Gate> failed;
    std::vector<RankProcess> ranks =
        start_group(daemon(), c, name, [&](const Group& group, std::uint32_t rank) -> std::string {
          break_and_go_on(c, group, rank, 30000, EPD_ENGINE_RESTARTED, *waiting, *failed);
          return "";
        });
    ASSERT_TRUE(eventually(60, [&] { return waiting->count == 3; }));
    sleep_ms(50);  // so that it is in the kernel, or about to be
    const pid_t engine = daemon().engine(victim % daemon().devices());
    ASSERT_GT(engine, 0);
    ASSERT_EQ(send_signal(engine, SIGKILL), 0);
    expect_all_ok(wait_all(ranks, 90));
  }
}

constexpr std::uint32_t kMostKills = 6;

// Rounds 0 .. most - 1 on so many slots, all enqueued as soon as there is space, and again from where the
// group says after each break. Until all ranks are through, a rank may be asked to redo what its peers have
// not completed.
void rounds_through_breaks(const Case& c, const Group& group, std::uint32_t rank, std::uint32_t slots,
                           Gate& finished) {
  constexpr std::uint64_t most = 200;
  // A refusal tells a host of a break, a stream continues to the end: all is done again after each kill.
  Rounds rounds(group, c, rank, most * (2 + kMostKills), slots);
  std::uint64_t epoch = epoch_of(group);
  std::uint64_t next = 0;  // operation
  for (const double end = now_s() + 60;;) {
    RANK_CHECK(now_s() < end, "not through");
    epd_status_t status = next % 2 != 0 ? rounds.try_submit_combine(next++ / 2) : EPD_OK;
    for (; status == EPD_OK && next < 2 * most; next += 2) status = rounds.try_submit(next / 2);
    if (status != EPD_OK) must(status, "a submission", EPD_ENGINE_RESTARTED);
    rounds.must_finish();
    const bool through = rounds.check_those_that_ended_well() && status == EPD_OK;
    if (through) {
      finished.arrive();
    }
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    do {
      if (finished.count.load() >= c.num_ranks) return;
      if (through) sleep_ms(2);
      status = epd_group_resume(group.get(), 20000, &info);
      if (finished.count.load() >= c.num_ranks) return;  // others may have left by now
      must(status, "resume");
      RANK_CHECK(now_s() < end, "the others are not through");
    } while (info.epoch == epoch || (through && info.resume_op >= next));
    if (through) finished.count.fetch_sub(1);
    epoch = info.epoch;
    next = info.resume_op;
  }
}

void kill_engines_under_rounds(const std::string& kind, const Case& c, std::uint32_t slots) {
  DaemonOptions options;
  use_devices(options, kind);
  options.settings = {{"engine.max_restarts_per_minute", "1000"}, {"engine.restart_backoff_max_ms", "20"}};
  Daemon own(options);
  ASSERT_TRUE(own.start());
  Shared<Gate> finished;
  std::vector<RankProcess> ranks =
      start_group(own, c, "under", [&](const Group& group, std::uint32_t rank) -> std::string {
        rounds_through_breaks(c, group, rank, slots, *finished);
        return "";
      });
  for (std::uint32_t kills = 0; kills < kMostKills && finished->count < c.num_ranks; ++kills) {
    sleep_ms(60 + 17 * static_cast<int>(kills));
    const pid_t engine = own.engine(kills % c.num_ranks % own.devices());
    if (engine > 0) send_signal(engine, SIGKILL);
  }
  expect_all_ok(wait_all(ranks, 90));
  own.stop();
}

TEST_P(StreamFailures, EnginesThatAreKilledUnderRoundsFarAhead) {
  const Case c = stream_case(3, 2);
  kill_engines_under_rounds(device_kind(), c, c.depth);
}

// Each dispatch overwrites the routing of the last but one, while as many operations are in flight as may be.
TEST_P(StreamFailures, EnginesThatAreKilledUnderRoundsFarAheadOnOneSlot) {
  for (const std::uint32_t depth : {4u, 16u}) {
    SCOPED_TRACE("depth " + std::to_string(depth));
    kill_engines_under_rounds(device_kind(), stream_case(3, depth), 1);
  }
}

TEST_P(StreamFailures, ADaemonThatIsKilledHoldsNoStream) {
  DaemonOptions options;
  use_devices(options, device_kind());
  Daemon own(options);
  ASSERT_TRUE(own.start());
  const Case c = stream_case(2, 1);
  Shared<Gate> waiting;
  Shared<Gate> killed;
  std::vector<RankProcess> ranks =
      start_group(own, c, "killed", [&](const Group& group, std::uint32_t rank) -> std::string {
        Rounds rounds(group, c, rank, 4);
        for (std::uint64_t i = 0; i < 2; ++i) rounds.submit(i);
        rounds.must_finish();
        rounds.check_all();
        if (rank == 0) {
          for (std::uint64_t i = 2; i < 4; ++i) rounds.submit(i);
          waiting->arrive();
          rounds.must_finish();  // nobody is in the library
          rounds.all_must_fail(EPD_DAEMON_LOST);
        } else {
          waiting->arrive();
          killed->wait_for(1);
        }
        epd_ticket_t ticket = 0;
        const bool lost = eventually(20, [&] {
          const epd_status_t status = epd_noop(group.get(), 0, rounds.stream().get(), &ticket);
          return status == EPD_DAEMON_LOST;
        });
        RANK_CHECK(lost, epd_last_error());
        return "";
      });
  ASSERT_TRUE(eventually(60, [&] { return waiting->count == 2; }));
  sleep_ms(50);
  own.signal(SIGKILL);
  killed->open();
  expect_all_ok(wait_all(ranks, 90));
}

// Two rounds that succeed; then two of rank 0's that nobody answers, and nobody of rank 0's is in the
// library.
void wait_in_vain(const Case& c, Rounds& rounds, std::uint32_t rank, Gate& waiting) {
  for (std::uint64_t i = 0; i < 2; ++i) rounds.submit(i);
  rounds.must_finish();
  rounds.check_all();
  waiting.meet(c.num_ranks);
  if (rank != 0) return;
  for (std::uint64_t i = 2; i < 4; ++i) rounds.submit(i);
  RANK_CHECK(!rounds.stream().idle(), "nobody answers");
  waiting.arrive();
}

TEST_P(StreamFailures, AGroupThatEndsHoldsNoStream) {
  for (const bool killed : {false, true}) {
    SCOPED_TRACE(killed ? "rank 1 is killed" : "rank 1 leaves");
    const Case c = stream_case(2, 1);
    const std::string name = group_name();
    Shared<Gate> waiting;
    std::vector<RankProcess> ranks =
        start_group(daemon(), c, name, [&](const Group& group, std::uint32_t rank) -> std::string {
          Rounds rounds(group, c, rank, 4);
          wait_in_vain(c, rounds, rank, *waiting);
          if (rank == 0) {
            rounds.must_finish();
            rounds.all_must_fail(EPD_RANK_LOST);
            return "";
          }
          waiting->wait_for(3);
          if (killed) ::raise(SIGKILL);
          return "";
        });
    const auto outcomes = wait_all(ranks, 90);
    EXPECT_TRUE(outcomes[0].ok) << outcomes[0].to_string();
    EXPECT_EQ(outcomes[1].ok, !killed) << outcomes[1].to_string();
  }
}

// Rank 0 waits for what nobody answers and nobody of it is in the library, its engine has gone, and `end`
// ends its part in the group: no engine will ever know of that again. The last of its rounds is submitted
// when the engine has gone.
template <typename End>
void end_without_an_engine(const std::string& kind, const Case& c, End end, epd_status_t told) {
  DaemonOptions options;
  use_devices(options, kind);
  options.settings.emplace_back("engine.restart_backoff_min_ms", "3000");
  Daemon own(options);
  ASSERT_TRUE(own.start());
  Shared<Gate> waiting;
  Shared<Gate> gone;
  std::vector<RankProcess> ranks =
      start_group(own, c, "ends", [&](const Group& group, std::uint32_t rank) -> std::string {
        Rounds rounds(group, c, rank, 5);
        wait_in_vain(c, rounds, rank, *waiting);
        if (rank == 1) ::pause();
        gone->wait_for(1);
        rounds.submit(4);
        const double since = now_s();
        waiting->arrive();
        rounds.must_finish();
        RANK_CHECK(now_s() - since < 15, "the waits had an end of their own: this shows nothing");
        rounds.all_must_fail(told);
        must(epd_group_check(group.get(), nullptr), "check", told);
        return "";
      });
  ASSERT_TRUE(eventually(60, [&] { return waiting->count == 3; }));
  sleep_ms(50);  // so that its stream waits for what an engine has
  ASSERT_EQ(send_signal(own.engine(0), SIGKILL), 0);
  ASSERT_TRUE(eventually(10, [&] { return own.log().find("engine died") != std::string::npos; }));
  gone->arrive();
  ASSERT_TRUE(eventually(60, [&] { return waiting->count == 4; }));
  end(own, ranks[1]);
  const RankOutcome outcome = ranks[0].wait(90);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  ranks[1].kill(SIGKILL);
  own.stop();
}

TEST_P(StreamFailures, AGroupThatEndsWhileItsEngineIsAwayHoldsNoStream) {
  end_without_an_engine(
      device_kind(), stream_case(2, 1), [](Daemon&, RankProcess& peer) { peer.kill(SIGKILL); },
      EPD_RANK_LOST);
}

TEST_P(StreamFailures, ARankThatIsEvictedWhileItsEngineIsAwayHoldsNoStream) {
  for (const bool degrade : {true, false}) {
    SCOPED_TRACE(degrade ? "the group goes on without it" : "the group ends");
    Case c = stream_case(2, 1);
    c.degrade = degrade;
    const auto evict = [](Daemon& own, RankProcess&) {
      EXPECT_EQ(own.epctl({"evict", "group", "ends", "rank", "0"}).exit_code, 0);
    };
    end_without_an_engine(device_kind(), c, evict, EPD_RANK_LOST);
  }
}

TEST_P(StreamFailures, AnEvictedSessionHoldsNoStream) {
  const Case c = stream_case(2, 1);
  const std::string name = group_name();
  Shared<Gate> waiting;
  Shared<std::atomic<std::uint64_t>> victim;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon().socket(), daemon().device(rank), c.wait_by_on(rank));
    const Group group(session, c.config(name.c_str(), rank));
    Rounds rounds(group, c, rank, 4);
    epd_session_info_t info;
    epd_session_info_init(&info);
    must(epd_session_info(session.get(), &info), "info");
    if (rank == 0) victim->store(info.session_id);
    wait_in_vain(c, rounds, rank, *waiting);
    if (rank == 0) {
      rounds.must_finish();
      // Asked first: a ticket that is taken before the session's end is noticed knows of a lost rank only.
      must(epd_session_check(session.get()), "the session", EPD_ABORTED);
      rounds.all_must_fail(EPD_ABORTED);
      waiting->arrive();
    }
    waiting->wait_for(4);
    return "";
  });
  ASSERT_TRUE(eventually(60, [&] { return waiting->count == 3; }));
  EXPECT_EQ(daemon().epctl({"evict", "session", std::to_string(victim->load())}).exit_code, 0);
  expect_all_ok(wait_all(ranks, 90));
}

// Calls that were enqueued after the waits also run before the regions go.
TEST_P(StreamFailures, LeavingAndDetachingHoldNoStream) {
  for (const bool leaves : {true, false}) {
    SCOPED_TRACE(leaves ? "the group is left" : "the session is detached");
    const Case c = stream_case(2, 1);
    const std::string name = group_name();
    Shared<Gate> waiting;
    std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
      Session session(daemon().socket(), daemon().device(rank), c.wait_by_on(rank));
      auto group = std::make_unique<Group>(session, c.config(name.c_str(), rank));
      Rounds rounds(*group, c, rank, 4);
      wait_in_vain(c, rounds, rank, *waiting);
      if (rank != 0) {
        waiting->wait_for(4);
        return "";
      }
      if (leaves) {
        group.reset();
      } else {
        session = Session();
        // The group goes with the session. It is kept where leak checkers find it.
        [[maybe_unused]] static const Group* volatile gone = nullptr;
        gone = group.release();
      }
      RANK_CHECK(rounds.stream().idle(), "leaving has waited for it");
      waiting->arrive();
      return "";
    });
    expect_all_ok(wait_all(ranks, 90));
  }
}

}  // namespace
}  // namespace epd::test
